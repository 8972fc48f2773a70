"""GPT-2 medium (350M) on four GPUs: fitting a model into memory.

Teaches   where the memory goes and what trades it for time: the micro-batch, bfloat16, activation checkpointing.
Needs     4 GPUs of 24 GB (these settings) or more; 60 GB of disk.
Data      python prepare.py fineweb10B
Start     torchrun --standalone --nproc_per_node=4 train.py configs/gpt2_350m.py
Watch     python train.py configs/gpt2_350m.py --plan=4 says 8.0 GB a GPU: 5.7 of weights, gradients and optimizer, 1.2 of activations.
          Then change one thing at a time: --activation_checkpointing=none (14 GB), with
          --batch_size=4 (10.5 GB) or --dtype=float32 (19 GB) on top of it.
          The curve does not follow activation checkpointing; step_ms does: a block is computed twice, a third more of the work.
Costs     13.5 hours on 4 x A100 (--plan=4 --plan_gpu=A100; an MFU of 40% is assumed).
Proves    validation loss under that of gpt2_124m at the same tokens. llm.c's run of this shape (scripts/run_gpt2_350M.sh: the same
          batch, rate and warmup, 31.5B tokens) is the reference to extend it towards: --max_iters=60000. Not measured here.
"""

from configs.gpt2_124m_ddp import *

n_layer, n_head, n_embd = 24, 16, 1024

batch_size = 8
activation_checkpointing = "block"

learning_rate = 3e-4  # GPT-3's for this size (arXiv 2005.14165, table 2.1)
max_iters = 19_073  # 10B tokens, 28 for each parameter

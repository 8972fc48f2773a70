"""The same GPT-2 124M on all GPUs of one machine: only the command changes.

Teaches   data parallelism: every GPU holds the whole model and takes its share of the update's 32 micro-batches; gradients are summed
          over all of them, once an update. Nothing else changes: same batch, same order of data, same curve.
Needs     one machine with 2, 4, 8, 16 or 32 GPUs of 24 GB or more (bfloat16); the data and the disk of gpt2_124m.
Data      python prepare.py fineweb10B
Start     torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_124m_ddp.py
          first: ... --check (do the GPUs reach each other, how fast), and python train.py configs/gpt2_124m_ddp.py --rehearse
Watch     tokens/s against one GPU's: 8 GPUs come near 8 times where the all-reduce of 871 MB an update hides behind the backward;
          loss and norm are those of gpt2_124m, update for update.
Costs     45 minutes on 8 x H100 (python train.py configs/gpt2_124m_ddp.py --plan=8; an MFU of 40% is assumed).
Proves    metrics.jsonl against that of configs/gpt2_124m.py: float32 losses agree to 1e-5 for the first updates, bfloat16's wander within
          the noise of a seed. With --deterministic=True they are the same bits. tests/test_distributed.py shows both on a CPU; not measured
          here on GPUs.
"""

from configs.gpt2_124m import *

parallel = "ddp"  # python train.py without torchrun says what is missing, instead of training 8 times slower

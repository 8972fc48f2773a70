"""GPT-2 XL (1558M), the model of 2019, on eight GPUs.

Teaches   a run of a day: shards and activation checkpointing together, checkpoints of 19 GB, and that something will die on the way.
Needs     8 GPUs of 24 GB (these settings) or more; 200 GB of disk that all ranks see.
Data      python prepare.py fineweb_edu10B
Start     torchrun --standalone --nproc_per_node=8 --max-restarts=10 train.py configs/gpt2_1558m_fsdp.py
          first: python train.py configs/gpt2_1558m_fsdp.py --rehearse, which kills a process and sees the run go on
Watch     8.0 GB a GPU (--plan=8), 27.5 without activation checkpointing, and 174 GB sent a GPU and update of 3.4 s: NVLink's business.
          On 80 GB --activation_checkpointing=none is faster. `saved` comes each 1000 updates, an hour: what a failure costs at most.
Costs     30 hours on 8 x H100 (--plan=8; an MFU of 40% is assumed). llm.c's run of this shape and batch took 24 hours on 8 x H100
          (scripts/run_gpt2_1558M.sh: 32,000 updates of 2.8 s).
Proves    a validation loss under gpt2_774m_fsdp's; text that holds together for a page. Not measured here.
"""

from configs.gpt2_774m_fsdp import *

dataset = "fineweb_edu10B"  # read 3.4 times (arXiv 2305.16264 finds up to four nearly as good as new text)

n_layer, n_head, n_embd = 48, 25, 1600

activation_checkpointing = "block"
batch_size = 8
total_batch_size = 1_048_576  # as llm.c's run, and GPT-3's for 1.3B

learning_rate = 2e-4  # GPT-3's for 1.3B; llm.c's run took 6e-4
max_iters = 32_000  # 33.6B tokens, 21 for each parameter

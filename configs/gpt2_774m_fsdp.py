"""GPT-2 large (774M) in shards on eight GPUs.

Teaches   FSDP (ZeRO-3, arXiv 1910.02054): each GPU holds an eighth of weights, gradients and optimizer; a block's weights are gathered for
          its forward and backward and let go again. Memory falls, traffic rises, the curve stays.
Needs     8 GPUs of 24 GB or more in one machine (16.7 GB are used; on PCIe the traffic shows, on NVLink it hides); 60 GB of disk.
Data      python prepare.py fineweb10B
Start     torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_774m_fsdp.py
Watch     --plan=8 says 1.5 GB of weights, gradients and optimizer a GPU where DDP has 12.4 (--parallel=ddp), and 43 GB sent a GPU and
          update where DDP has 5.4: gathers come with each micro-batch, so a larger batch_size sends less.
          --reshard_after_forward=False keeps what the forward gathered: a gather less (33 GB in all), 1.3 GB more memory.
Costs     23 hours on 8 x A100 (--plan=8 --plan_gpu=A100; an MFU of 40% is assumed).
Proves    the same curve with --parallel=ddp on GPUs that hold it whole, for a few hundred updates. One epoch of 10B tokens is too few for
          this size (20 tokens a parameter are 15.5B, arXiv 2203.15556): it reads them 1.6 times, which costs next to nothing (up to four
          times, arXiv 2305.16264). Not measured here.
"""

from configs.gpt2_350m import *

n_layer, n_head, n_embd = 36, 20, 1280

parallel = "fsdp"
activation_checkpointing = "none"  # what shards free goes to activations

learning_rate = 2.5e-4  # GPT-3's for this size (arXiv 2005.14165, table 2.1)
max_iters = 30_000  # 15.7B tokens

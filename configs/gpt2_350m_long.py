"""GPT-2 medium (350M) with a context of 32,768 tokens on eight GPUs that share every sequence.

Teaches   context parallelism: a rank holds a head and a tail part of each sequence; in attention keys and values of the whole sequence are
          gathered, a layer at a time, and queries stay where they are. What that sends, and what grows with the square of the length.
Needs     1 machine with 8 GPUs of 24 GB, NVLink or PCIe between them; 40 GB of disk.
Data      python prepare.py fineweb10B     (documents are joined, so a window of 32k tokens holds many; books or code make better use of it)
Start     torchrun --standalone --nproc_per_node=8 train.py configs/gpt2_350m_long.py
Watch     python train.py configs/gpt2_350m_long.py --plan=8 says 10.4 GB a GPU, of which activations 3.7, and 135 GB of keys, values and their
          gradients that a GPU sends in an update, against 2.5 GB of gradients. Then --cp=4, --cp=2: the same curve, 2 or 4 sequences in work at
          a time, 7.3 and 14.7 GB of activations, and 58 and 19 GB sent. --cp=1 takes 36 GB, which a GPU of 24 GB does not have.
Costs     33 hours on 8 x A100 (--plan=8 --plan_gpu=A100; an MFU of 40% is assumed); attention is four fifths of the work at this length.
Proves    the same curve for every cp (to rounding), and against --block_size=1024 at the same tokens: what the longer context brings shows
          in the loss of late positions only where documents are long. Not measured here.
"""

from configs.gpt2_350m import *

block_size = 32_768
pos = "rope"  # rotary positions: a table of 32,768 learned ones would be 34M more parameters, most seldom trained
rope_theta = 500_000.0  # slow enough for 32k positions (Llama 3's; arXiv 2309.16039 on why)

cp = 8
activation_checkpointing = "none"  # sequences are cut instead
batch_size = 1
total_batch_size = 524_288  # 16 sequences

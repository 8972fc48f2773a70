"""Llama 3's 8B shape with its layers cut over the eight GPUs of a machine, and shards across machines: Megatron's idea.

Teaches   tensor parallelism inside a machine, where links are fast: a GPU has an eighth of the heads and of the MLP, and of the tokens where
          norms work on them; two gathers and two scatters of the residual stream a layer, each way. FSDP outside, over the machines.
Needs     2 machines with 8 GPUs of 80 GB each, NVLink inside, InfiniBand or 100 Gbit/s between them, a disk that all of them see (1 TB).
Data      as for llama_8b_hsdp
Start     as llama_8b_hsdp, with this config (configs/launch/slurm.sbatch)
          first: python train.py configs/llama_8b_tp_fsdp.py --rehearse, then the job with --check at the end
Watch     32.5 GB a GPU (--plan=16), 22 of them activations that nothing computes again. An update sends 7.9 TB a GPU of activations inside its
          machine and, since shards lie across, 0.5 TB of weights and gradients over the network: llama_8b_hsdp sends 4 GB there.
          Tensor parallelism pays where layers are too large for one GPU, or the batch too small for each GPU to have sequences of its own.
          Then --tp=4 and --tp=2: the same curve.
Costs     17 days on 16 x H100 for 159B tokens if 40% of the peak were reached, as --plan=16 assumes: with this traffic it takes longer.
Proves    the first few hundred updates against llama_8b_hsdp: the same curve, to rounding. Not measured here.
"""

from configs.llama_8b_hsdp import *

dp_replicate = 1
tp = 8  # a machine's GPUs; n_kv_head = 8 is the most
activation_checkpointing = "none"
batch_size = 2

"""Llama 3's 8B shape on two or more machines of eight GPUs: shards inside a machine, replicas across.

Teaches   HSDP: gathers stay on the fast links inside a machine (8 shards), only shards' gradients cross the network, summed over replicas.
          Also a modern block: rotary positions, RMSNorm, SwiGLU, grouped queries, an untied head.
Needs     2 machines with 8 GPUs of 80 GB each, InfiniBand or 100 Gbit/s between them, a disk that all of them see (1 TB).
Data      python prepare.py fineweb_edu10B --tokenizer=PATH/tokenizer.json --name=fineweb_edu_llama3
          with Llama 3's tokenizer.json (meta-llama/Meta-Llama-3-8B on the hub, after its licence); 10B tokens are a start, not enough
Start     sbatch configs/launch/slurm.sbatch       (or by hand on each machine, as README, "Two machines", says)
          first: python train.py configs/llama_8b_hsdp.py --rehearse, then the job with --check at the end
Watch     39 GB a GPU (--plan=16): 16 of weights, gradients and optimizer, 13.5 of gathered blocks and the root. An update of 38 s sends
          1.8 TB a GPU inside its machine and 4 GB a GPU across (32 GB a machine); with --dp_replicate=1 all of it would cross.
          More machines: --dp_replicate=4 on 32 GPUs, and so on; the batch and the curve stay.
Costs     17 days on 16 x H100 for 159B tokens (--plan=16; an MFU of 40% is assumed); a checkpoint is 96 GB. Llama 3's own 8B
          saw 15T tokens (arXiv 2407.21783).
Proves    the first few hundred updates against --dp_replicate=1 (one replica of 16 shards): the same curve. Not measured here.
"""

dataset = "fineweb_edu_llama3"

n_layer, n_head, n_kv_head, n_embd = 32, 32, 8, 4096
mlp_hidden = 14_336
block_size = 8192
vocab_size = 128_256  # Llama 3's tokenizer
norm, pos, mlp = "rmsnorm", "rope", "swiglu"
rope_theta = 500_000.0
tie_embeddings = False

parallel = "fsdp"
dp_replicate = 2  # replicas, one a machine
activation_checkpointing = "block"  # without: 43 GB more

batch_size = 1
total_batch_size = 4_194_304  # Llama 3's first batch size

learning_rate = 3e-4  # Llama 3's for 8B (arXiv 2407.21783, table 3)
min_lr = 3e-5
warmup_iters = 2000
max_iters = 38_000  # 159B tokens, 20 for each parameter (arXiv 2203.15556)
weight_decay = 0.1

eval_interval = 500
eval_tokens = 10_485_760
save_interval = 100  # an hour: what a failure costs at most
keep_last = 3
log_interval = 1

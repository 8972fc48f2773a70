"""SFT of Qwen3 8B on 8 GPUs: the same records, the same loop, parameters and optimizer in shards.

Teaches   a model whose optimizer state fits no single GPU is tuned by another launch command.
Needs     8 GPUs with 80 GB; torchrun ... --plan=8 says what goes where. Each checkpoint takes 98 GB.
Data      as in qwen3_sft.
Start     torchrun --standalone --nproc_per_node=8 train.py configs/qwen3_8b_sft_fsdp.py --dataset my_data.json
Watch     what qwen3_sft says; each rank reads its own part of the weights, so that loading takes seconds and no rank holds them whole.
Reaches   not measured here yet.
"""

from configs.qwen3_sft import *

init_from = "Qwen/Qwen3-8B"
n_layer, n_head, n_kv_head, n_embd, head_dim = 36, 32, 8, 4096, 128
mlp_hidden = 12_288
tie_embeddings = False

parallel = "fsdp"
total_batch_size = 131_072  # 4 rows a GPU and update
save_interval = 200
keep_last = 1

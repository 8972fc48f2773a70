"""SFT of Qwen3 0.6B on your own records, on one GPU.

Teaches   answers alone are learnt; records share rows and do not see each other; what was forgotten is a number.
Needs     one GPU with 24 GB or more; python train.py configs/qwen3_sft.py --plan=1 says what goes where. With --lora_rank=16, 12 GB.
Data      any .json, .jsonl, .parquet, folder or hub data set of questions and answers or chats (data/records.py has the shapes); it is
          prepared on the way, with a report. The default is 10,000 records from the hub.
Start     python train.py configs/qwen3_sft.py --model Qwen/Qwen3-0.6B --dataset my_data.json
Watch     labelled share, duplicates and dropped records in the report before step 0; the validation loss against the training loss (it
          rises in the second or third epoch: then there were too many); with --general_dataset, prepared with the same tokenizer, the
          loss on general text beside them.
Reaches   not measured here yet.
          Talk to it: python sample.py --out_dir=out/qwen3_sft --chat
"""

init_from = "Qwen/Qwen3-0.6B"
task = "sft"
dataset = "HuggingFaceH4/no_robots"

# what the weights are made of; they have the last word
n_layer, n_head, n_kv_head, n_embd, head_dim = 28, 16, 8, 1024, 128
mlp_hidden, vocab_size = 3072, 151_936
norm, norm_eps, pos, rope_theta, mlp, qk_norm = "rmsnorm", 1e-6, "rope", 1e6, "swiglu", True
block_size = 4096  # tokens a row, of the 40,960 that it knows

batch_size = 1
total_batch_size = 65_536  # 16 rows an update
activation_checkpointing = "block"

num_epochs = 2.0
learning_rate = 1e-5
min_lr = 0.0
lr_schedule = "linear"
warmup_iters = 20
weight_decay = 0.0

eval_interval = 50
eval_tokens = 524_288
log_interval = 1

"""The same GPT-2 124M on two machines with one GPU each: what a network adds.

Teaches   rendezvous (how processes of two machines find each other), what the network costs, whose disk the checkpoints are on.
Needs     two machines with a GPU of 24 GB or more each that reach each other over TCP; a network of 10 Gbit/s or more.
          No shared disk: each machine has its copy of the data (compared at the start), the first one keeps the run's folder.
Data      python prepare.py fineweb10B         (on both, or copy data/fineweb10B)
Start     on both machines, the first one's address in both commands:
          torchrun --nnodes=2 --nproc_per_node=1 --max-restarts=3 --rdzv_backend=c10d --rdzv_id=gpt2 --rdzv_endpoint=FIRST:29400 \\
              train.py configs/gpt2_124m_2node.py
          first with --check at the end. Where it hangs: README, "Two machines". Slurm and Kubernetes: configs/launch/
Watch     the all-reduce sends 498 MB an update from each machine: 4 s at 1 Gbit/s, 0.4 s at 10. If tokens/s is not near twice one
          GPU's, compare that with step_ms. Then kill a process on one machine: both start again from the last checkpoint.
Costs     18 hours on 2 x RTX 4090 (--plan=2 --plan_gpu="RTX 4090"; an MFU of 40% is assumed).
Proves    the curve of gpt2_124m, update for update; tests/test_two_machines.py shows it between two network namespaces. Not
          measured here on two GPU machines.
"""

from configs.gpt2_124m_ddp import *

check_replicas_interval = 1000  # two machines, two memories: a parameter that differs between them is found, not trained on

"""The arguments of PFLlib's main.py that its base classes read, in every comparison with it."""

from typing import Any

DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "algorithm": "ours",
    "goal": "test",
    "save_folder_name": "items",
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 1.0,
    "join_ratio": 1.0,
    "random_join_ratio": False,
    "few_shot": 0,
    "time_select": False,
    "time_threthold": 1e9,
    "top_cnt": 100,
    "auto_break": False,
    "eval_gap": 1,
    "client_drop_rate": 0.0,
    "train_slow_rate": 0.0,
    "send_slow_rate": 0.0,
    "dlg_eval": False,
    "dlg_gap": 100,
    "batch_num_per_client": 2,
    "num_new_clients": 0,
    "fine_tuning_epoch_new": 0,
}

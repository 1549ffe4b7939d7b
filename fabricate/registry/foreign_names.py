"""Names of Lightning, transformers' Trainer and Accelerate, and the counterparts of these names in fabricate.

Every such name is in this file: arguments, attributes, methods, keywords of `self.log`, hooks, precisions and strategies. The names appear
in error messages only; they are never synonyms. The value of a name is what to use instead, or "nothing: " and the reason why the user can
delete the name. Names whose counterpart is uncertain are not listed: no hint is better than a wrong one.

Must not know: the names that fabricate itself has.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from fabricate.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")

_LAUNCHER = "the launcher (fabricate run --nproc N)"
_OPTIMIZER = "configure_optimizers, which returns the optimizer with its options"
_SCHEDULE = "configure_optimizers: return (optimizer, 'cosine:warmup=0.1') or any scheduler"
_BEST = "keep={'last': 1, 'best': 1, 'metric': 'val_loss', 'mode': 'min'}"
_SUMMARY = "plugins=[ModelSummary()]"
_FINDER = "fit(..., batch_size=BatchSizeFinder())"
_RESUME = "fit(..., resume='path of a checkpoint'); with a run_dir, the same call resumes"
_UPLOAD = "plugins=[HubPush('user/name')], or fabricate push RUN_DIR user/name"
_SAMPLER = "a sampler in a DataLoader"
_LIGER = "use_liger(model) of the package fabricate-text, in configure_model"
_TRACKIO = "trackers=['trackio:...'], whose options go to trackio.init"
_GENERATE = (
    "model.generate(..., with these options) in validation_step; return the tokens under 'outputs' for compute_metrics"
)
_VERBOSITY = "nothing: call transformers.logging.set_verbosity(...) in the script"
_RECOMPUTED = "nothing: blocks are computed again as in torch's non-reentrant checkpoints"

ARGUMENTS = {
    # Lightning
    "callbacks": "plugins=[...]",
    "callback": "plugins=[...]",
    "logger": "trackers=[...]",
    "loggers": "trackers=[...]",
    "accumulate_grad_batches": "gradient_accumulation_steps=",
    "gradient_clip_val": "max_grad_norm=",
    "gradient_clip_algorithm": "max_grad_norm= or max_grad_value=",
    "track_grad_norm": "plugins=[GradientNorms()]",
    "devices": _LAUNCHER,
    "gpus": _LAUNCHER,
    "num_processes": _LAUNCHER,
    "tpu_cores": _LAUNCHER,
    "accelerator": "the launcher, or ACCELERATE_USE_CPU=true",
    "num_nodes": "the launcher (fabricate run --nnodes N)",
    "default_root_dir": "run_dir=",
    "weights_save_path": "run_dir=",
    "val_check_interval": "validate_every=",
    "check_val_every_n_epoch": "validate_every=",
    "log_every_n_steps": "log_every=",
    "enable_progress_bar": "progress=",
    "progress_bar_refresh_rate": "progress=",
    "enable_checkpointing": "run_dir=",
    "checkpoint_callback": "run_dir=, save_every= and keep=",
    "num_sanity_val_steps": "sanity_batches=",
    "resume_from_checkpoint": _RESUME,
    "resume": _RESUME,
    "ckpt_path": _RESUME,
    "enable_model_summary": _SUMMARY,
    "weights_summary": _SUMMARY,
    "model_summary": _SUMMARY,
    "sync_batchnorm": "strategy='ddp:sync_batchnorm=true'",
    "benchmark": "torch.backends.cudnn.benchmark = True in the script",
    "profiler": "plugins=[Profiler()]",
    "inference_mode": "nothing: evaluations run without gradients",
    "use_distributed_sampler": "nothing: data is divided over the ranks, and a sampler of yours is respected",
    "replace_sampler_ddp": "nothing: data is divided over the ranks, and a sampler of yours is respected",
    "reload_dataloaders_every_n_epochs": "a sampler or an iterable that changes with the epoch",
    "auto_scale_batch_size": _FINDER,
    "auto_lr_find": "plugins=[LearningRateFinder()] in a fit of its own, and its suggestion() in configure_optimizers",
    "enable_autolog_hparams": "nothing: constructor arguments are recorded, and trackers get them",
    "barebones": "progress=False, save_every=None, validate_every=None",
    "amp_backend": "precision=",
    "move_metrics_to_cpu": "nothing: metrics are reduced at log boundaries",
    # transformers
    "report_to": "trackers=[...]",
    "output_dir": "run_dir=",
    "logging_dir": "run_dir=",
    "bf16": "precision='bf16'",
    "fp16": "precision='fp16'",
    "tf32": "precision='tf32'",
    "num_train_epochs": "max_epochs=",
    "epochs": "max_epochs=",
    "num_epochs": "max_epochs=",
    "n_epochs": "max_epochs=",
    "steps": "max_steps=",
    "log_steps": "log_every=",
    "log_interval": "log_every=",
    "progress_bar": "progress=",
    "clip_grad_norm": "max_grad_norm=",
    "grad_clip": "max_grad_norm=",
    "args": "from_training_arguments: Trainer(**from_training_arguments(args).trainer)",
    "overwrite_output_dir": "fit(..., resume='never'), which moves existing files aside",
    "remove_unused_columns": "nothing: every column is passed on; leave some out in collate_fn",
    "label_names": "nothing: training_step takes from the batch what it needs",
    "neftune_noise_alpha": "NEFTune(alpha) of the package fabricate-text, in plugins=",
    "learning_rate": "configure_optimizers",
    "lr": "configure_optimizers",
    "weight_decay": _OPTIMIZER,
    "optim": _OPTIMIZER,
    "optim_args": _OPTIMIZER,
    "optim_target_modules": _OPTIMIZER,
    "optimizer_cls_and_kwargs": _OPTIMIZER,
    "optimizer": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "lr_scheduler_type": _SCHEDULE,
    "lr_scheduler": _SCHEDULE,
    "lr_scheduler_kwargs": _SCHEDULE,
    "warmup_steps": "configure_optimizers: return (optimizer, 'linear:warmup=500')",
    "warmup_ratio": "configure_optimizers: return (optimizer, 'linear:warmup=0.1')",
    "eval_strategy": "validate_every=",
    "evaluation_strategy": "validate_every=",
    "eval_steps": "validate_every='500 steps'",
    "eval_on_start": "validate_first=",
    "eval_delay": "on_step in a callback that calls trainer.request_eval() from then on",
    "eval_accumulation_steps": "nothing: outputs go to host memory after each batch",
    "eval_do_concat_batches": "nothing: compute_metrics gets one item per sample",
    "eval_use_gather_object": "nothing: outputs may be tensors, lists and mappings of them",
    "prediction_loss_only": "nothing: only what validation_step returns is kept",
    "include_for_metrics": "nothing: validation_step returns under 'outputs' what compute_metrics gets",
    "preprocess_logits_for_metrics": "validation_step, which returns under 'outputs' what compute_metrics gets",
    "batch_eval_metrics": "a torchmetrics object in self.log, which adds up the batches",
    "predict_with_generate": _GENERATE,
    "generation_max_length": _GENERATE,
    "generation_num_beams": _GENERATE,
    "generation_config": _GENERATE,
    "bf16_full_eval": "precision=, which evaluations use too",
    "fp16_full_eval": "precision=, which evaluations use too",
    "save_strategy": "save_every=",
    "save_steps": "save_every='500 steps'",
    "save_total_limit": "keep=",
    "save_only_model": "save_weights_only=",
    "save_on_each_node": "run_dir= on a file system that all nodes see",
    "enable_jit_checkpoint": "nothing: SIGTERM saves and ends a fit",
    "ignore_data_skip": "nothing: a resumed run continues at the next row without reading the rows before it",
    "restore_callback_states_from_checkpoint": "nothing: what callbacks save is restored",
    "load_best_model_at_end": f"load_best=True with {_BEST}",
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "logging_strategy": "log_every=",
    "logging_steps": "log_every='500 steps'",
    "logging_first_step": "log_every='1 step', or on_step in a callback",
    "logging_nan_inf_filter": "nothing: a loss that is not finite is never hidden; nonfinite= sets what happens then",
    "log_on_each_node": "nothing: rank 0 prints",
    "log_level": _VERBOSITY,
    "log_level_replica": _VERBOSITY,
    "include_num_input_tokens_seen": "nothing: trainer.progress.tokens counts them; plugins=[Throughput()] for tokens per second",
    "skip_memory_metrics": "plugins=[DeviceStats()]",
    "debug": "detect_anomaly=True",
    "disable_tqdm": "progress=False",
    "run_name": "trackers=['wandb:name=...'] or another option of the tracker",
    "project": "trackers=['wandb:project=...']",
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "per_device_train_batch_size": "fit(..., batch_size=)",
    "per_device_eval_batch_size": "a DataLoader as val, which has its own batch_size",
    "auto_find_batch_size": _FINDER,
    "batch_size": "fit(..., batch_size=)",
    "num_workers": "fit(..., num_workers=)",
    "data_collator": "fit(..., collate_fn=)",
    "dataloader_num_workers": "fit(..., num_workers=)",
    "dataloader_drop_last": "a DataLoader(..., drop_last=True) as train",
    "dataloader_pin_memory": "a DataLoader(..., pin_memory=True)",
    "dataloader_persistent_workers": "a DataLoader(..., persistent_workers=True)",
    "dataloader_prefetch_factor": "a DataLoader(..., prefetch_factor=2)",
    "dataloader_multiprocessing_context": "a DataLoader(..., multiprocessing_context='spawn')",
    "dataloader_in_order": "nothing: batches come in their order",
    "group_by_length": _SAMPLER,
    "length_column_name": _SAMPLER,
    "sortish_sampler": _SAMPLER,
    "train_sampling_strategy": "fit(..., shuffle=False) for 'sequential'; for others a sampler in a DataLoader",
    "model": "trainer.fit(module, train, val)",
    "train_dataset": "trainer.fit(module, train, val)",
    "eval_dataset": "trainer.fit(module, train, val)",
    "compute_metrics": "the module's compute_metrics(self, outputs), of what validation_step returns under 'outputs'",
    "compute_loss_func": "training_step, which returns the loss",
    "tokenizer": "an attribute of the module, which model/ then contains",
    "early_stopping_patience": "plugins=[EarlyStopping('val_loss', patience=3)]",
    "processing_class": "an attribute of the module, which model/ then contains",
    "torch_compile": "compile=",
    "torch_compile_mode": "compile={'mode': ...}",
    "torch_compile_backend": "compile={'backend': ...}",
    "gradient_checkpointing": "activation_checkpointing=",
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "use_liger_kernel": _LIGER,
    "liger_kernel_config": _LIGER,
    "use_cache": "nothing: set model.config.use_cache",
    "torch_empty_cache_steps": "on_step in a callback that calls torch.accelerator.empty_cache()",
    "average_tokens_across_devices": "nothing: a cross-entropy is weighted by the labels that it counts, over all ranks",
    "label_smoothing_factor": "next_token_loss(..., label_smoothing=) of the package fabricate-text, or cross_entropy with it",
    "full_determinism": "deterministic=True and seed=",
    "data_seed": "seed=",
    "deepspeed": "strategy='zero2' or 'zero3', with 'zero3:config=FILE' for a DeepSpeed file",
    "fsdp": "strategy='fsdp'",
    "fsdp_config": "strategy='fsdp:...', with its options after the colon",
    "ddp_find_unused_parameters": "strategy='ddp:find_unused_parameters=true'",
    "ddp_static_graph": "strategy='ddp:static_graph=true'",
    "ddp_bucket_cap_mb": "strategy='ddp:bucket_cap_mb=25'",
    "ddp_broadcast_buffers": "nothing: the buffers of rank 0 are broadcast before each forward, as in torch by default",
    "ddp_backend": "nothing: the device decides, NCCL or gloo",
    "ddp_timeout": "timeout='30 minutes'",
    "local_rank": "nothing: the launcher sets it",
    "parallelism_config": "strategy='fsdp' or 'fsdp:tp=N'",
    "accelerator_config": "batch_size=, which is per rank; every row is used once, and the other options have no counterpart",
    "do_train": "nothing: call trainer.fit",
    "do_eval": "nothing: call trainer.validate",
    "do_predict": "nothing: call trainer.predict or trainer.test",
    "model_init": "configure_model",
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
            "hub_revision",
        ),
        _UPLOAD,
    ),
    "use_cpu": "ACCELERATE_USE_CPU=true in the environment",
    "no_cuda": "ACCELERATE_USE_CPU=true in the environment",
    # Accelerate
    "mixed_precision": "precision=",
    "log_with": "trackers=[...]",
    "project_dir": "run_dir=",
    "cpu": "ACCELERATE_USE_CPU=true in the environment",
    "fsdp_plugin": "strategy='fsdp'",
    "deepspeed_plugin": "strategy='zero2' or 'zero3'",
    "gradient_accumulation_plugin": "gradient_accumulation_steps=",
    "dynamo_backend": "compile={'backend': ...}",
    "split_batches": "nothing: batch_size is per rank; global_batch_size= is that of all ranks",
    "even_batches": "nothing: every row is used once, on any number of ranks",
    "dataloader_config": "nothing: fabricate divides the data over the ranks",
    "step_scheduler_with_optimizer": "nothing: a schedule advances once per update, or per epoch: (optimizer, scheduler, 'epoch')",
    "kwargs_handlers": "options of the strategy or the precision: 'ddp:find_unused_parameters=true'",
    # other names that users try
    "device": "the launcher, or ACCELERATE_USE_CPU=true",
    "world_size": _LAUNCHER,
    "amp": "precision='bf16' or 'fp16'",
    "verbose": "progress= and log_every=",
    "log_dir": "run_dir=",
    "metrics": "self.log in training_step and validation_step",
    "monitor": _BEST,
    "patience": "plugins=[EarlyStopping('val_loss', patience=3)]",
    "early_stopping": "plugins=[EarlyStopping('val_loss', patience=3)]",
    "scheduler": _SCHEDULE,
    "loss_fn": "training_step, which returns the loss",
    "criterion": "training_step, which returns the loss",
    "val_loader": "fit(module, train, val)",
    "shuffle": "fit(..., shuffle=)",
}
"""Arguments of a trainer."""

_DATAMODULE = "fit(module, train, val), with the loaders that its train_dataloader() and val_dataloader() return"

FIT = {
    "model": "fit(module, train, val): the module comes first",
    "train_dataloader": "train=, or the second position",
    "train_dataloaders": "train=, or the second position",
    "train_dataset": "train=, or the second position",
    "val_dataloader": "val=, or the third position",
    "val_dataloaders": "val=, or the third position",
    "eval_dataset": "val=, or the third position",
    "val_dataset": "val=, or the third position",
    "val_loader": "val=, or the third position",
    "validation_data": "val=, or the third position",
    "train_loader": "train=, or the second position",
    "callbacks": "Trainer(plugins=[...])",
    "datamodule": _DATAMODULE,
    "ckpt_path": "resume='path of a checkpoint'; with a run_dir, the same call resumes",
    "resume_from_checkpoint": "resume='path of a checkpoint'; with a run_dir, the same call resumes",
    "weights_only": "nothing: checkpoints hold no pickle",
    "trial": "nothing: a search calls fit, see examples/sweep.py",
    "ignore_keys_for_eval": "nothing: validation_step returns what is kept",
    "data_collator": "collate_fn=",
    "drop_last": "a DataLoader(..., drop_last=True) as train",
    "val_batch_size": "a DataLoader as val, which has its own batch_size",
    "eval_batch_size": "a DataLoader as val, which has its own batch_size",
    "pin_memory": "a DataLoader(..., pin_memory=True)",
    "persistent_workers": "a DataLoader(..., persistent_workers=True)",
    "prefetch_factor": "a DataLoader(..., prefetch_factor=2)",
    "sampler": "a DataLoader(..., sampler=...)",
    "max_epochs": "Trainer(max_epochs=...)",
    "max_steps": "Trainer(max_steps=...)",
    "epochs": "Trainer(max_epochs=...)",
}
"""Keywords of `fit`."""

EVALUATE = {
    "model": "the module in the first position",
    "dataloaders": "data=, or the second position",
    "dataloader": "data=, or the second position",
    "val_dataloaders": "data=, or the second position",
    "test_dataloaders": "data=, or the second position",
    "eval_dataset": "data=, or the second position",
    "test_dataset": "data=, or the second position",
    "datamodule": "data=, with what its dataloader method returns",
    "ckpt_path": "checkpoint=: a path, 'best' or 'last'",
    "verbose": "nothing: the metrics are returned",
    "return_predictions": "nothing: predictions are returned",
    "ignore_keys": "nothing: the step returns what is kept",
    "metric_key_prefix": "nothing: names begin with the stage (val_loss), and with the name of a set: val={'a': ..., 'b': ...}",
    "max_length": "an argument of generate, in the step",
    "num_beams": "an argument of generate, in the step",
    "weights_only": "nothing: checkpoints hold no pickle",
}
"""Keywords of `validate`, `test` and `predict`."""

TRANSFORMERS_TRAINER = {
    "save_model": "module.export, or RUN_DIR/model/ after the fit",
    "evaluate": "trainer.validate(module, data)",
    "train": "trainer.fit(module, train, val)",
    "is_world_process_zero": "trainer.is_main",
    "args": "trainer.settings",
    "control": "trainer.stop('reason'), trainer.request_save() and trainer.request_eval()",
    "is_local_process_zero": "trainer.accelerator.is_local_main_process",
    "optimizer": "trainer.optimizers",
    "lr_scheduler": "configure_optimizers, which returns it; the learning rate is logged as 'lr'",
    "model_wrapped": "trainer.accelerator.unwrap_model, or the argument `module` of a hook",
    "callback_handler": "the objects that were passed in plugins=",
    "add_callback": "Trainer(plugins=[...])",
    "remove_callback": "Trainer(plugins=[...]) without it",
    "pop_callback": "Trainer(plugins=[...]) without it",
    "train_dataset": "the data that was passed to fit",
    "eval_dataset": "the data that was passed to fit",
    "data_collator": "fit(..., collate_fn=)",
    "compute_metrics": "module.compute_metrics",
    "processing_class": "module.tokenizer, which model/ then contains",
    "tokenizer": "module.tokenizer, which model/ then contains",
    "log": "module.log(name, value)",
    "log_metrics": "print(trainer.validate(module, data)), which returns the metrics",
    "save_metrics": "metrics.jsonl in run_dir, which has every value",
    "save_state": "trainer.save(path); metrics.jsonl has every value",
    "push_to_hub": _UPLOAD,
    "create_model_card": "module.export(self, path), which writes the files of model/",
    "init_hf_repo": _UPLOAD,
    "hyperparameter_search": "several fits, see examples/sweep.py",
    "get_train_dataloader": "the data that was passed to fit",
    "get_eval_dataloader": "the data that was passed to fit",
    "get_test_dataloader": "the data that was passed to test",
    "num_examples": "len of the data that was passed to fit",
    "floating_point_ops": "plugins=[Throughput()], which counts FLOPs",
    "create_optimizer": "configure_optimizers",
    "create_scheduler": "configure_optimizers",
    "create_optimizer_and_scheduler": "configure_optimizers",
    "get_decay_parameter_names": "module.parameter_groups({'bias|Norm': {'weight_decay': 0.0}})",
    "get_optimizer_cls_and_kwargs": "from_training_arguments(args).optimizers(module)",
    "training_step": "module.training_step",
    "compute_loss": "module.training_step, which returns the loss",
    "prediction_step": "module.validation_step",
    "evaluation_loop": "trainer.validate(module, data)",
    "get_total_train_batch_size": "trainer.plan(...), which shows the global batch",
    "tune": "Trainer(plugins=[LearningRateFinder()]) in a fit of its own; fit(..., batch_size=BatchSizeFinder())",
    "backward": "training_step, which returns the loss",
}
"""Attributes and methods of transformers' trainer."""

TRAINER = {
    "global_step": "trainer.step",
    "current_epoch": "trainer.epoch",
    "callback_metrics": "trainer.metrics",
    "logged_metrics": "trainer.metrics",
    "progress_bar_metrics": "trainer.metrics",
    "world_size": "trainer.accelerator.num_processes",
    "num_devices": "trainer.accelerator.num_processes",
    "global_rank": "trainer.accelerator.process_index",
    "local_rank": "trainer.accelerator.local_process_index",
    "is_global_zero": "trainer.is_main",
    "estimated_stepping_batches": "trainer.total_steps",
    "num_training_batches": "trainer.total_steps, the number of updates in all",
    "max_epochs": "trainer.settings.max_epochs",
    "max_steps": "trainer.settings.max_steps",
    "should_stop": "trainer.stop('reason')",
    "log": "module.log(name, value)",
    "save_checkpoint": "trainer.save(path)",
    "default_root_dir": "trainer.run_dir",
    "log_dir": "trainer.run_dir",
    "logger": "self.log(name, value), and trainer.tracker(name) for what is not a number",
    "loggers": "self.log(name, value), and trainer.tracker(name) for what is not a number",
    "datamodule": "the data that was passed to fit",
    "train_dataloader": "the data that was passed to fit",
    "val_dataloaders": "the data that was passed to fit",
    "test_dataloaders": "the data that was passed to test",
    "lightning_module": "the argument `module` of a hook",
    "model": "the argument `module` of a hook",
    "lr_scheduler_configs": "self.log in on_step; the learning rate is logged as 'lr'",
    "checkpoint_callback": "trainer.run_dir; fit returns the newest and the best checkpoint",
    "checkpoint_callbacks": "trainer.run_dir; fit returns the newest and the best checkpoint",
    "early_stopping_callback": "the EarlyStopping object that was passed in plugins=",
    "callbacks": "the objects that were passed in plugins=",
    "print": "module.print",
    "training": "the hook that is called: on_step runs in training, on_eval_start and on_eval_end around an evaluation",
    "validating": "the argument `stage` of on_eval_start and on_eval_end",
    "testing": "the argument `stage` of on_eval_start and on_eval_end",
    "predicting": "the argument `stage` of on_eval_start and on_eval_end",
    "sanity_checking": "Trainer(sanity_batches=0) to leave the check before training out; what a step changes in it is restored",
    "state": "trainer.progress",
    **TRANSFORMERS_TRAINER,
}
"""Attributes and methods of a trainer."""

MODULE = {
    "save_hyperparameters": "nothing: constructor arguments are recorded in checkpoints",
    "hparams": "an attribute that __init__ sets; constructor arguments are recorded in checkpoints",
    "log_dict": "self.log(name, value) for each item",
    "global_step": "self.trainer.step",
    "current_epoch": "self.trainer.epoch",
    "global_rank": "self.trainer.accelerator.process_index",
    "local_rank": "self.trainer.accelerator.local_process_index",
    "logger": "self.log(name, value), and self.trainer.tracker(name) for what is not a number",
    "loggers": "self.log(name, value), and self.trainer.tracker(name) for what is not a number",
    "optimizers": "self.trainer.optimizers; with several optimizers, training_step(self, batch, optimizer) is called for each in turn",
    "lr_schedulers": "configure_optimizers: a scheduler that it returns is advanced by the loop",
    "manual_backward": "training_step, which returns the loss",
    "toggle_optimizer": "training_step(self, batch, optimizer), called for each optimizer in turn with the other parameters frozen",
    "untoggle_optimizer": "training_step(self, batch, optimizer), called for each optimizer in turn with the other parameters frozen",
    "toggled_optimizer": "training_step(self, batch, optimizer), called for each optimizer in turn with the other parameters frozen",
    "clip_gradients": "Trainer(max_grad_norm=...)",
    "all_gather": "self.trainer.accelerator.gather(tensor), or torch.distributed.nn.functional.all_gather(tensor) with gradients",
    "freeze": "self.requires_grad_(False) and self.eval() before a fit, self.trainer.freeze(parameters) during it",
    "unfreeze": "self.requires_grad_(True) before a fit, self.trainer.unfreeze(parameters) during it",
    "to_onnx": "torch.onnx.export",
    "to_torchscript": "torch.jit.trace",
    "current_device": "self.device",
    "on_gpu": "self.device.type == 'cuda'",
    "fabric": "self.trainer.accelerator",
    "example_input_array": "nothing: plugins=[ModelSummary()] shows the shapes of a real batch",
}
"""Attributes and methods of a module. `dtype` is not among them: parameters can differ in dtype (use `next(self.parameters()).dtype`)."""

MODULE_SETTINGS = {
    "automatic_optimization": (
        False,
        "several optimizers: configure_optimizers returns them by name, and training_step(self, batch, optimizer) is called for each in "
        "turn, or returns the one that an update is for: {'loss': loss, 'optimizer': name}",
    ),
}
"""Attributes that users set on a module: the value that has an effect in the other framework, and what to use instead."""

SET_ON_TRAINER = {**ARGUMENTS, **TRAINER, "should_stop": "trainer.stop('reason')"}
"""Attributes that users set on a trainer."""

LOG = {
    "prog_bar": "nothing: the bar shows the loss and as many other metrics as fit; choose them with Trainer(progress=['accuracy'])",
    "on_step": "nothing: values are logged every log_every, and over the epoch as 'epoch_NAME'",
    "on_epoch": "nothing: values are logged every log_every, and over the epoch as 'epoch_NAME'",
    "sync_dist": "nothing: values are reduced over ranks",
    "sync_dist_group": "nothing: values are reduced over ranks",
    "rank_zero_only": "nothing: values are reduced over ranks, every rank logs",
    "reduce_fx": "reduce='mean' or 'sum', or a torchmetrics object",
    "batch_size": "weight=, where the mean was not taken over the rows of the batch",
    "logger": "nothing: every value goes to metrics.jsonl and the trackers",
    "enable_graph": "nothing: a value is detached",
    "add_dataloader_idx": "nothing: fit(..., val={'a': ..., 'b': ...}) names the sets",
    "metric_attribute": "nothing: a torchmetrics object may be logged as it is",
    "step": "nothing: a value belongs to the update in which it is logged",
}
"""Keywords of `self.log`."""

LOAD = {
    "strict": "nothing: the names in a checkpoint have to be those of the module; to load a part, use fabricate ckpt export and "
    "load_state_dict",
    "map_location": "nothing: weights are loaded on the CPU",
    "checkpoint_path": "the path in the first position",
    "hparams_file": "nothing: constructor arguments are recorded in checkpoints",
    "weights_only": "nothing: checkpoints hold no pickle",
}
"""Keywords of `load_from_checkpoint`."""

PRECISIONS = {
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "fp16-mixed": "fp16",
    "16": "fp16",
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "32": "fp32",
    "32-true": "fp32",
    "float32": "fp32",
    "fp8-mixed": "fp8",
    "transformer-engine": "fp8",
}
"""Names of precisions. Those that mean float16 or float64 parameters have no counterpart."""

NO_PRECISION = {
    "16-true": "parameters in float16 do not train stably; use precision='fp16' (autocast and loss scaling) or 'bf16-true'",
    "fp16-true": "parameters in float16 do not train stably; use precision='fp16' (autocast and loss scaling) or 'bf16-true'",
    **dict.fromkeys(
        ("64-true", "fp64", "float64", "double"),
        "for float64 call module.double() before fit, with precision='fp32', and give batches in float64",
    ),
    "64": "for float64 call module.double() before fit, with precision='fp32', and give batches in float64",
}
"""Precisions that fabricate does not have, and what to do instead."""

_STOPPING = "the object: plugins=[EarlyStopping('val_loss', patience=3)]"
_UNFREEZING = "the object: plugins=[UnfreezeAt({'backbone': '1 epoch'})]"
_WRITER = "the object: plugins=[PredictionWriter('predictions')]"
_SAVED = "run_dir=, with save_every= and keep= for what is saved and kept"

PLUGINS = {
    "EarlyStopping": _STOPPING,
    "early_stopping": _STOPPING,
    "EarlyStoppingCallback": _STOPPING,
    **{
        name: f"the object: plugins=[{name}()]"
        for name in (
            "DeviceStats",
            "GradientNorms",
            "LearningRateFinder",
            "ModelSummary",
            "Profiler",
            "SaveOnException",
            "Throughput",
        )
    },
    "GenerateSamples": "the object: plugins=[GenerateSamples(['Once upon a time'])]",
    "PredictionWriter": _WRITER,
    "StochasticWeightAveraging": "the object: plugins=[StochasticWeightAveraging(swa_lrs=1e-2)]",
    "UnfreezeAt": _UNFREEZING,
    # Lightning
    "BackboneFinetuning": _UNFREEZING,
    "BaseFinetuning": _UNFREEZING,
    "BasePredictionWriter": _WRITER,
    "BatchSizeFinder": _FINDER,
    "DeviceStatsMonitor": "plugins=[DeviceStats()]",
    "EMAWeightAveraging": "plugins=['ema'], of the package fabricate-ema",
    "LearningRateMonitor": "nothing: learning rates are logged",
    "ModelCheckpoint": _SAVED,
    "model_checkpoint": _SAVED,
    "OnExceptionCheckpoint": "plugins=[SaveOnException()]",
    "RichModelSummary": "plugins=[ModelSummary()]",
    "RichProgressBar": "progress=True",
    "TQDMProgressBar": "progress=True",
    "ThroughputMonitor": "plugins=[Throughput()]",
    "Timer": "max_time='11 hours'",
    # transformers
    "ProgressCallback": "progress=True",
    "NotebookProgressCallback": "progress=True",
    "PrinterCallback": "progress=, which prints lines where there is no terminal",
    "DefaultFlowCallback": "nothing: log_every=, validate_every= and save_every= set the intervals",
    "TensorBoardCallback": "trackers=['tensorboard']",
    "WandbCallback": "trackers=['wandb']",
    "MLflowCallback": "trackers=['mlflow']",
    "TrackioCallback": "trackers=['trackio']",
    "CometCallback": "trackers=['comet_ml']",
    "ClearMLCallback": "trackers=['clearml']",
    "DVCLiveCallback": "trackers=['dvclive']",
    "SwanLabCallback": "trackers=['swanlab']",
}
"""Names of callbacks of fabricate, Lightning and transformers."""

IMPORTS = {
    "LightningModule": "TrainModule",
    "LightningDataModule": _DATAMODULE,
    "TrainerCallback": "Callback",
    "TrainingArguments": "the arguments of Trainer, or from_training_arguments",
    "Seq2SeqTrainer": "Trainer",
    "Accelerator": "Trainer, whose trainer.accelerator is an accelerate.Accelerator",
    "Fabric": "Trainer, whose trainer.accelerator is an accelerate.Accelerator",
    "set_seed": "seed_everything",
    "DDPStrategy": "DDP",
    "FSDPStrategy": "FSDP",
    **{name: remedy for name, remedy in PLUGINS.items() if name[0].isupper()},
}
"""Names that users of Lightning, transformers and Accelerate try to import."""

TRACKERS = {
    "csv": "nothing: metrics.jsonl in run_dir has every value, a JSON object per line",
    "csvlogger": "nothing: metrics.jsonl in run_dir has every value, a JSON object per line",
    "none": "trackers=[]",
    "tensorboardx": "trackers=['tensorboard']",
    "weights_and_biases": "trackers=['wandb']",
}
"""Names of trackers."""

STRATEGIES = {
    "deepspeed": "zero2",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_1_offload": "zero1:offload_optimizer=cpu",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_2_offload": "zero2:offload_optimizer=cpu",
    "deepspeed_stage_3": "zero3",
    "deepspeed_stage_3_offload": "zero3:offload_optimizer=cpu,offload_param=cpu",
    "ddp_find_unused_parameters_true": "ddp:find_unused_parameters=true",
    "ddp_find_unused_parameters_false": "ddp",
    "ddp_spawn": "ddp",
    "ddp_fork": "ddp",
    "ddp_notebook": "ddp",
    "ddp_static_graph": "ddp:static_graph=true",
    "dp": "ddp",
    "multi_gpu": "ddp",
    "fsdp2": "fsdp",
    "full_shard": "fsdp",
    "fsdp_native": "fsdp",
    "shard_grad_op": "fsdp:reshard_after_forward=false",
    "fsdp_cpu_offload": "fsdp:offload=cpu",
    "model_parallel": "fsdp:tp=N",
    "zero_1": "zero1",
    "zero_2": "zero2",
    "zero_3": "zero3",
    "no": "single",
    "single_device": "single",
}
"""Names of strategies."""

_ONE_OF_RDZV = "--nnodes N --node-rank I --master-addr HOST --master-port PORT"

RUN = {
    "--nproc-per-node": "--nproc N",
    "--num-processes": "--nproc N",
    "--gpus": "--nproc N",
    "--ngpus": "--nproc N",
    "--num-gpus": "--nproc N",
    "--gpus-per-node": "--nproc N",
    "--devices": "--nproc N",
    "--multi-gpu": "--nproc N",
    "--num-nodes": "--nnodes N",
    "--num-machines": "--nnodes N",
    "--machine-rank": "--node-rank I",
    "--main-process-ip": "--master-addr HOST",
    "--main-process-port": "--master-port PORT",
    "--rdzv-endpoint": _ONE_OF_RDZV,
    "--rdzv-backend": _ONE_OF_RDZV,
    "--rdzv-id": _ONE_OF_RDZV,
    "--standalone": "nothing: the ranks of one node find a port",
    "--mixed-precision": "--precision NAME",
    "--config-file": "--config FILE",
    "--deepspeed-config-file": "--config FILE",
    "--use-fsdp": "--strategy fsdp",
    "--use-deepspeed": "--strategy zero2, or zero3",
    "--zero-stage": "--strategy zero2, or zero3",
    "--dynamo-backend": "Trainer(compile=True)",
    "--gpu-ids": "CUDA_VISIBLE_DEVICES in the environment",
}
"""Options of torchrun, `accelerate launch` and Lightning's command line, with dashes."""

HOOKS = {
    # Lightning
    "on_train_start": "on_fit_start",
    "on_train_end": "on_fit_end",
    "on_train_epoch_start": "on_epoch_start, which is called where a run resumes within an epoch too",
    "on_train_epoch_end": "on_epoch_end",
    "on_train_batch_start": "train_step (wrap it)",
    "on_train_batch_end": "on_accumulate (per micro-batch) or on_step (per update)",
    "on_before_backward": "train_step (wrap it)",
    "on_after_backward": "on_accumulate",
    "on_before_optimizer_step": "on_before_step",
    "on_before_zero_grad": "on_step",
    "on_validation_start": "on_eval_start",
    "on_validation_end": "on_eval_end",
    "on_validation_epoch_start": "on_eval_start",
    "on_validation_epoch_end": "on_eval_end",
    "on_validation_batch_start": "eval_step (wrap it)",
    "on_validation_batch_end": "eval_step (wrap it)",
    "on_validation_model_eval": "on_eval_start",
    "on_validation_model_train": "on_eval_end",
    "on_test_start": "on_eval_start",
    "on_test_end": "on_eval_end",
    "on_test_epoch_start": "on_eval_start",
    "on_test_epoch_end": "on_eval_end",
    "on_test_batch_start": "eval_step (wrap it)",
    "on_test_batch_end": "eval_step (wrap it)",
    "on_predict_start": "on_eval_start",
    "on_predict_end": "on_eval_end",
    "on_predict_epoch_start": "on_eval_start",
    "on_predict_epoch_end": "on_eval_end",
    "on_predict_batch_start": "eval_step (wrap it)",
    "on_predict_batch_end": "eval_step (wrap it)",
    "on_sanity_check_start": "on_eval_start",
    "on_sanity_check_end": "on_eval_end",
    "on_save_checkpoint": "on_save",
    "on_load_checkpoint": "on_load",
    "training_epoch_end": "on_epoch_end",
    "validation_epoch_end": "on_eval_end",
    "test_epoch_end": "on_eval_end",
    "training_step_end": "training_step",
    "validation_step_end": "validation_step",
    "optimizer_zero_grad": "nothing: gradients are cleared after each update",
    "lr_scheduler_step": "nothing: return (optimizer, scheduler) from configure_optimizers",
    "configure_callbacks": "Trainer(plugins=[...])",
    "configure_gradient_clipping": "Trainer(max_grad_norm=...), Trainer(max_grad_value=...) or on_before_step",
    "configure_sharded_model": "configure_model",
    "train_dataloader": "trainer.fit(module, train, val)",
    "val_dataloader": "trainer.fit(module, train, val)",
    "test_dataloader": "trainer.test(module, data)",
    "predict_dataloader": "trainer.predict(module, data)",
    "manual_backward": "nothing: return the loss from training_step",
    # transformers
    "on_init_end": "on_fit_start",
    "on_train_begin": "on_fit_start",
    "on_epoch_begin": "on_epoch_start",
    "on_step_begin": "train_step (wrap it)",
    "on_pre_optimizer_step": "on_before_step",
    "on_optimizer_step": "on_step",
    "on_substep_end": "on_accumulate",
    "on_step_end": "on_step",
    "on_evaluate": "on_eval_end",
    "on_predict": "on_eval_end",
    "on_prediction_step": "eval_step (wrap it)",
    "on_push_begin": "on_saved",
    "create_optimizer": "configure_optimizers",
    "transfer_batch_to_device": "nothing: batches are moved to the device, also those of a class of your own with a `to` method",
    "on_before_batch_transfer": "collate_fn",
    "on_after_batch_transfer": "training_step",
    "tbptt_split_batch": "training_step, or data that yields the parts",
    "lr_scheduler_reset": "configure_optimizers",
    "create_scheduler": "configure_optimizers",
    "create_optimizer_and_scheduler": "configure_optimizers",
    "get_train_dataloader": "trainer.fit(module, train, val)",
    "get_eval_dataloader": "trainer.fit(module, train, val)",
    "get_test_dataloader": "trainer.test(module, data)",
    "prediction_step": "validation_step",
    "evaluation_loop": "validation_step",
    "test_step_end": "validation_step",
    "predict_epoch_end": "on_eval_end",
}
"""Hooks and methods that users override, and where to put their code."""

COMMON_NAMES = {
    "setup": (("stage",), "configure_model() or on_fit_start()"),
    "teardown": (("stage",), "on_teardown()"),
    "prepare_data": ((), "code before trainer.fit()"),
    "backward": (("loss",), "training_step, which returns the loss; on_accumulate() follows its backward"),
    "compute_loss": (("model", "inputs"), "training_step()"),
}
"""Method names that helpers often have too. With these first arguments, a method is taken for Lightning's or transformers'; second: what to
use."""

CALLBACK_NAMES = {
    "setup": (("trainer",), "on_fit_start()"),
    "teardown": (("trainer",), "on_teardown()"),
    "state_dict": ((), "on_save(self, state), which puts values into `state`"),
    "load_state_dict": (("state_dict",), "on_load(self, state)"),
}
"""The same for methods of callbacks."""


def begins_with(method: Callable[..., Any], arguments: tuple[str, ...]) -> bool:
    """Whether the parameters of `method` after self begin with `arguments`. If `arguments` is empty, `method` must have no other
    parameters."""
    given = tuple(inspect.signature(method).parameters)[1:]
    return given[: len(arguments)] == arguments if arguments else not given


def use(name: str, names: Mapping[str, str]) -> str:
    """The remedy for `name`, as the end of an error ("; use max_grad_norm="). Empty if `name` is not in `names`."""
    if name not in names:
        return ""
    verb, colon, why = names[name].partition("nothing: ")
    return f"; leave it out: {why}" if colon and not verb else f"; use {names[name]}"


def hint(name: str, names: Mapping[str, str], valid_names: Iterable[str]) -> str:
    """The remedy as from `use`; else the nearest of `valid_names`, if `name` looks like a misspelling of it."""
    near = difflib.get_close_matches(name, sorted(valid_names), n=1, cutoff=0.85)
    return use(name, names) or (f"; did you mean {near[0]!r}?" if near else "")


def translated(names: Mapping[str, str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that raises `ConfigurationError`, with the remedy from `names`, for keywords that the function does not have."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = [name for name in inspect.signature(function).parameters if name != "self"]
        where = function.__qualname__.removesuffix(".__init__").removeprefix("TrainModule.")

        keywords_only = all(p.kind is p.KEYWORD_ONLY for p in list(inspect.signature(function).parameters.values())[1:])

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            if keywords_only and len(args) > 1:
                raise ConfigurationError(
                    f"{where} takes keyword arguments only, and fit takes module and data: {where}(max_epochs=3).fit(module, train, val)"
                )
            for name in kwargs:
                if name not in parameters:
                    raise ConfigurationError(f"{where} has no argument {name!r}{hint(name, names, parameters)}")
            return function(*args, **kwargs)

        return checked

    return decorate


def missing_attribute(owner: Any, name: str, names: Mapping[str, str]) -> AttributeError:
    """The error for an attribute that `owner` does not have."""
    return AttributeError(f"{type(owner).__name__} has no attribute {name!r}{use(name, names)}", name=name, obj=None)

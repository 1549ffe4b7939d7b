"""The TrainJob in examples/cluster, checked with Kubeflow's model of a TrainJob."""

from __future__ import annotations

from pathlib import Path

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

MANIFEST = Path(__file__).parents[2] / "examples" / "cluster" / "trainjob.yaml"


def test_kubeflows_model_of_a_train_job_holds_every_line_of_the_manifest() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    job = TrainerV1alpha1TrainJob.from_dict(manifest)
    assert job is not None
    assert job.to_dict() == manifest, "a key that the model does not have is dropped by it"

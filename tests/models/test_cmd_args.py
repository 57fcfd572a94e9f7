"""Arguments: what may be read back, and options of the launcher that are not arguments here."""

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs, ResolvedCmdArgs
from tests.cases import every


@pytest.mark.parametrize("model", [MegatronBridgeCmdArgs, ResolvedCmdArgs])
def test_what_was_written_out_can_be_read_back(model: type[ResolvedCmdArgs]) -> None:
    """Also the names that are not set: CloudAI reads every definition twice."""
    written = model().model_dump()
    again = model.model_validate(written)
    assert again.model_dump() == written
    assert again.model_family_name == ""


def test_a_blank_name_in_an_axis_is_refused() -> None:
    with pytest.raises(ValidationError, match="must not be blank"):
        MegatronBridgeCmdArgs.model_validate({"model_recipe_name": ["a", " "]})


@every("name", ["kubeflow_namespace", "dgxc_cluster", "csp"])
def test_other_schedulers_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} is for Kubernetes or DGX Cloud; this tool submits"):
        MegatronBridgeCmdArgs.model_validate({name: "x"})


@every("name", ["env", "custom_env_vars", "custom_srun_args", "additional_slurm_params"])
def test_what_is_set_elsewhere_is_named(name: str) -> None:
    with pytest.raises(ValidationError, match=rf"{name} is not an argument here; set extra_\w+ of"):
        MegatronBridgeCmdArgs.model_validate({name: "x"})

"""Arguments: what may be read back, and options of the launcher that are not arguments here."""

import pytest
from pydantic import ValidationError

from cloudai_mbridge.models.cmd_args import MegatronBridgeCmdArgs, ResolvedCmdArgs
from tests.cases import every
from tests.golden import Sentence


@pytest.mark.parametrize("model", [MegatronBridgeCmdArgs, ResolvedCmdArgs])
def test_what_was_written_out_can_be_read_back(model: type[ResolvedCmdArgs]) -> None:
    """Also the names that are not set: CloudAI reads every definition twice."""
    written = model().model_dump()
    again = model.model_validate(written)
    assert again.model_dump() == written
    assert again.model_family_name == ""


def test_a_blank_name_in_an_axis_is_refused(sentence: Sentence) -> None:
    with pytest.raises(ValidationError) as caught:
        MegatronBridgeCmdArgs.model_validate({"model_recipe_name": ["a", " "]})
    sentence(caught)


@every(
    ("name", "remedy"),
    [
        *((name, "is for Kubernetes or DGX Cloud") for name in ("kubeflow_namespace", "dgxc_cluster", "csp")),
        *((name, r"is not an argument here; set extra_\w+ of") for name in ("env", "custom_env_vars")),
        *((name, "set extra_srun_args of") for name in ("custom_srun_args", "additional_slurm_params")),
    ],
)
def test_an_option_that_is_no_argument_is_refused_with_a_remedy(name: str, remedy: str) -> None:
    for model in (MegatronBridgeCmdArgs, ResolvedCmdArgs):
        with pytest.raises(ValidationError, match=f"{name} .*{remedy}"):
            model.model_validate({name: "x"})

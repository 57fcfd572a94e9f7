"""`mbridge verify-configs` on a file that other tools take."""

from pathlib import Path

from click.testing import CliRunner

from cloudai_mbridge.cli import cli


def test_a_test_may_have_an_empty_name(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    args = 'launcher = "embedded"\nmodel_recipe_name = "gpt_tiny"\ncompute_dtype = "fp32"\nnum_gpus = 1\ngb = 8\n'
    path.write_text(f'name = ""\ndescription = ""\ntest_template_name = "MegatronBridge"\n[cmd_args]\n{args}')
    result = CliRunner().invoke(cli, ["verify-configs", str(path)], standalone_mode=False)
    assert result.exception is None, result.output
    assert "1 point, 0 of them rejected" in result.output

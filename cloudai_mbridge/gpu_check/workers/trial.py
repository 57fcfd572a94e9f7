"""Train a configuration although the loop refuses a field of it: to find out whether it could be allowed.

    python -m cloudai_mbridge.gpu_check.workers.trial --lift SECTION.FIELD CONFIG section.field=value ...

Only for the kit: every other run is refused. Prints the loop's own log lines.
"""

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--lift", action="append", default=[], help="a field that the loop refuses")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    from cloudai_mbridge.training.config import ConfigContainer
    from cloudai_mbridge.training.config.text.overrides import apply_overrides
    from cloudai_mbridge.training.gpt_step import forward_step
    from cloudai_mbridge.training.pretrain import pretrain
    from cloudai_mbridge.training.schema import not_done

    for field in args.lift:
        not_done.ASKS_FOR_NOTHING.pop(field, None)
    config = apply_overrides(ConfigContainer.from_yaml(args.config), args.overrides)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()

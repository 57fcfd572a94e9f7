"""One rank of a real run with gloo: writes what it communicates in its second step, as a rehearsal counts it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from cloudai_mbridge.training import cpu

cpu.install()

from cloudai_mbridge.training.callbacks import Callback  # noqa: E402
from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.dry.communication import Recorder  # noqa: E402
from cloudai_mbridge.training.gpt_step import forward_step  # noqa: E402
from cloudai_mbridge.training.pretrain import pretrain  # noqa: E402


class Recording(Callback):
    """Records the second step: the first one gathers no parameters in its forward pass."""

    def on_train_step_start(self, context: Any) -> None:
        if context.state.train_state.step == 1:
            self.recorder = Recorder(is_real=True)
            self.context = self.recorder.recording()
            self.context.__enter__()

    def on_train_step_end(self, context: Any) -> None:
        if context.state.train_state.step == 1:
            self.context.__exit__(None, None, None)


def main() -> None:
    recording = Recording()
    pretrain(ConfigContainer.from_yaml(sys.argv[1]), forward_step, [recording])
    log = recording.recorder.log
    document = {"totals": log.totals(), "log": log.document()}
    Path(f"counted{os.environ['RANK']}.json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()

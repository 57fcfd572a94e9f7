"""The search as an agent of CloudAI, which finds it by its entry point: `agent = "tune"` in a test definition.

CloudAI expands, submits and waits, one point after the other; the agent chooses the next point and when to stop.
"""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from cloudai.configurator.base_agent import BaseAgent, BaseAgentConfig

from cloudai_mbridge.integrations.cloudai_point import Refused, known_of
from cloudai_mbridge.plan.run_plan import SearchPlan
from cloudai_mbridge.tune.belief import Prior
from cloudai_mbridge.tune.measured_search import positions_of
from cloudai_mbridge.tune.search import CHANCE, Search, Trial

Action = dict[str, Any]


class TuneAgent(BaseAgent):
    """Chooses points by predictions and measurements; stops when no other point is likely to be 2 % faster.

    It minimises 1 / reward: with CloudAI's usual reward, `inverse`, and a step time as the metric, that is the step
    time. A reward that is not positive is of a point that failed.
    """

    def __init__(self, env: Any, config: BaseAgentConfig) -> None:
        super().__init__(env, config)
        self.configure(env.define_action_space())

    @staticmethod
    def get_config_class() -> Any:
        """Return CloudAI's own class: this agent needs no other configuration."""
        return BaseAgentConfig

    def configure(self, config: dict[str, Any]) -> None:
        """Take the points of a space. config: the values of each name."""
        names = list(config)
        self.actions: list[Action] = [dict(zip(names, row, strict=True)) for row in itertools.product(*config.values())]
        found = self._known()
        if found is not None:
            self.actions = [action for action, one in zip(self.actions, found, strict=True) if one is not None]
        known = [one for one in found or () if one is not None]
        self.prior = Prior.of(known, positions_of(self.actions))
        self._told: list[tuple[int, float | None]] = []
        limit = self.env.test_run.test.agent_steps
        self.max_steps = min(limit, len(self.actions)) if limit > 1 else len(self.actions)  # 1 is CloudAI's default

    def select_action(self, observation: list[float] | None = None) -> tuple[int, Action] | None:
        """Return the number of the next step and its point; None if another is not worth its cost."""
        del observation
        search, claims = self._search(self.prior), self._search(self.prior.for_claims())
        if search.best is not None and (chance := claims.chance_of_better()) < CHANCE:
            best = self.actions[search.best.index]
            logging.info("tune: %s is the best with probability %.1f %%", best, 100 * (1 - chance))
            return None
        if (index := search.next()) is None:
            return None
        return len(self._told) + 1, self.actions[index]

    def update_policy(self, _feedback: Mapping[str, Any]) -> None:
        """Learn from a step. _feedback: "action" and its reward, "value"."""
        reward = float(_feedback["value"])
        self._told.append((self.actions.index(_feedback["action"]), 1 / reward if reward > 0 else None))

    def _known(self) -> list[SearchPlan | None] | None:
        """Return the search plan of every point, None for a point that breaks a rule; None without predictions."""
        try:
            return known_of(self.env.test_run, self.env.runner.system, self.actions)
        except Refused as error:
            logging.info("tune: no predictions: %s", error.message)
            return None

    def _search(self, prior: Prior) -> Search:
        measured = {index: seconds for index, seconds in self._told if seconds is not None}
        search = Search(prior.beliefs(measured), prior.room())
        for index, seconds in self._told:
            if seconds is None:
                search.exclude(index)
            else:
                search.learn(Trial(index, seconds))
        return search

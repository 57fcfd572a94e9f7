"""States of nodes as `sinfo` writes them, long or short, with or without a suffix (sinfo(1), NODE STATE CODES)."""

_OUT_OF_SERVICE = (
    *("blocked", "boot", "down", "drain", "drng", "error", "fail", "futr", "future", "inval", "maint"),
    *("npc", "perfctrs", "pow", "reboot", "unk"),
)
_FREE = ("idle", "comp", "resv", "reserved")


def is_out_of_service(state: str) -> bool:
    """Return whether a node in this state runs nothing until somebody acts; `*` is one that does not answer."""
    return state.endswith("*") or state.startswith(_OUT_OF_SERVICE)


def is_free(state: str) -> bool:
    """Return whether CloudAI takes a node in this state for `max_avail`."""
    return not is_out_of_service(state) and state.startswith(_FREE)

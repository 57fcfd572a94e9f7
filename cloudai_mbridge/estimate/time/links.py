"""How fast a group of ranks exchanges data: inside the NVLink domain, and across it."""

from cloudai_mbridge.estimate.hardware import Gpu


def ring_gb_s(gpu: Gpu, ranks: int, stride: int) -> float:
    """Return the speed of a ring of `ranks`, `stride` apart, in 1e9 byte/s and direction, as seen by one rank.

    A ring within the NVLink domain runs at NVLink speed. One across it runs at the speed of the adapters of those of
    its ranks that share a domain, for as many rings run side by side; never faster than NVLink.
    """
    nvlink, nic = gpu.nvlink_gb_s or 0.0, gpu.nic_gb_s or 0.0
    if ranks * stride <= gpu.nvlink_domain:
        return nvlink
    together = max(1, gpu.nvlink_domain // stride)
    return min(nvlink, nic * together)


def exchange_shares(gpu: Gpu, ranks: int, copies: int) -> tuple[float, float]:
    """Return how often a token crosses NVLink and how often the network, on its way to experts on `ranks` neighbours.

    A token goes to a rank once however many of its `copies` experts live there, and to another domain once; behind the
    network it is spread over NVLink. Experts are chosen evenly.
    """
    near = _reached(ranks, copies) * (ranks - 1) / ranks
    if ranks <= gpu.nvlink_domain:
        return near, 0.0
    domains = ranks / gpu.nvlink_domain
    return near, _reached(domains, copies) * (domains - 1) / domains


def _reached(places: float, copies: int) -> float:
    """Return how many of `places` hold one of `copies` experts, on average."""
    return float(places * (1 - (1 - 1 / places) ** copies))

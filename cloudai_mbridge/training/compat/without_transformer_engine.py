"""What Megatron-Core gets wrong where Transformer Engine is not installed, on any device."""


def define_missing_names() -> None:
    """Define the names that say so."""
    from megatron.core.transformer import multi_latent_attention as mla
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16: the router asks whether it is None
        moe_utils.te_general_gemm = None
    if not isinstance(mla.TELinear, type):  # the flag may be True and the class a mock
        mla.HAVE_TE = False

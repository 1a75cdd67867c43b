from fpmsdk._ext.pages import PrefixKeys

class RollingKeys(PrefixKeys):
    def __init__(self, num_requests: int, trace_block_tokens: int, block_size: int, few_nodes: int = 16384) -> None: ...

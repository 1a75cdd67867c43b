from fpmsdk._ext.online_split import SplitSearch
from fpmsdk._ext.online_trees import OnlineTrees

class OnlineForest(OnlineTrees):
    @property
    def search(self) -> SplitSearch: ...

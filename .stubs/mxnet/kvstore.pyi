from typing import Any

class KVStoreBase: ...

class KVStore(KVStoreBase):
    handle: Any

def __getattr__(name: str) -> Any: ...

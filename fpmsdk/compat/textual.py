"""The form of the model that exchanges configurations as JSON text. Source: clients.md section 1, tier 0."""

import json
from typing import Any

from fpmsdk.config.parse import parse_text
from fpmsdk.errors import ConfigError
from fpmsdk.perfmodel.model import ForwardPassPerfModel


class TextualPerfModel(ForwardPassPerfModel):
    """`ForwardPassPerfModel` whose `normalize_config` reads and returns text."""

    @staticmethod
    def normalize_config(config: Any) -> Any:
        """The canonical form of a configuration: compact JSON text with sorted keys, of JSON text.

        Raises
        ------
        ConfigError: no text, no JSON, or a configuration that is refused.

        Example
        -------
        >>> text = '{"model": "m", "system": "s", "backend": "vllm", "worker_type": "decode", "estimation_mode": "fpm"}'
        >>> TextualPerfModel.normalize_config(text)[:36]
        '{"attention_backend":null,"attention'
        """
        if not isinstance(config, str):
            raise ConfigError(f"a configuration as JSON text is needed, found {type(config).__name__}")
        document = parse_text(config)
        return json.dumps(ForwardPassPerfModel.normalize_config(document), separators=(",", ":"), sort_keys=True)

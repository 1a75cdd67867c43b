"""A coverage-guided run of the same checks, in an environment with atheris: options are those of libFuzzer.

The first byte of an input chooses the kind, the rest is what `state.bin` or `manifest.json` holds.
"""

import json
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["fpmsdk.snapshot", "fpmsdk.perfmodel", "fpmsdk.config"]):
    from fpmsdk import ForwardPassPerfModel
    from tests.snapshot import fuzz


def main():
    with tempfile.TemporaryDirectory() as folder:
        built = fuzz.targets(Path(folder) / "fuzz", observations=40)
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, target in enumerate(built):
            (corpus / f"state{number}").write_bytes(bytes((number,)) + target.state)
        # Manifests through the whole constructor, of a kind that is quick to build.
        manifest_of = built[0]
        manifest = (manifest_of.folder / "manifest.json").read_bytes()
        (corpus / "manifest").write_bytes(b"\xff" + manifest)

        def one(data):
            if not data:
                return
            if data[0] == 0xFF:
                try_manifest(manifest_of, data[1:])
            else:
                fuzz.try_state(built[data[0] % len(built)], data[1:])

        atheris.Setup([sys.argv[0], *sys.argv[1:], str(corpus)], one)
        atheris.Fuzz()


def try_manifest(target, content):
    config = json.loads(json.dumps(target.config))
    (target.folder / "manifest.json").write_bytes(content)
    fuzz.pin(config, target.folder, content)
    try:
        model = ForwardPassPerfModel.best_available(config)
    except fuzz.REFUSALS:
        return
    if fuzz.STATES.encode(model._kind.state_parts()) != target.state:
        raise fuzz.Difference("restored another state than the one on disk")


if __name__ == "__main__":
    main()

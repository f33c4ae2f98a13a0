"""Run an AOTInductor package in a process that knows nothing but torch and the op library.

    python aoti_child.py PACKAGE INPUTS OUTPUTS [LIBRARY]

INPUTS is a saved list of image tensors; OUTPUTS receives the list of results. The package
`wtconv_ops` is not imported: what a package needs at run time is `libwtconv_ops.so` alone.
"""

from __future__ import annotations

import sys

import torch
import torch._inductor


def main(arguments: list[str]) -> int:
    """Run the package named in ``arguments``; 1 if `wtconv_ops` got imported on the way."""
    package, inputs, outputs, *library = arguments
    for path in library:
        torch.ops.load_library(path)
    model = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        results = [model(image) for image in torch.load(inputs, weights_only=True)]
    if "wtconv_ops" in sys.modules:
        print("wtconv_ops was imported", file=sys.stderr)
        return 1
    torch.save(results, outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

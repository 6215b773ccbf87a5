"""Serve a deployed model over HTTP, with the standard library only.

    pdecay deploy my_project.training:build --out model.safetensors
    python examples/serve.py model.safetensors --port 8000
    curl localhost:8000 -d '{"inputs": [[0.1, 0.2, 0.3]]}'

The file holds the weights and the program of the model, so that the server needs torch and pdecay,
but not the code that trained the model. A request is JSON with the rows of one input tensor; the
answer has the rows of the output.
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

import pdecay

MAX_BYTES = 10_000_000  # the largest request


class Handler(BaseHTTPRequestHandler):
    """A handler of POST requests; the model is an attribute of its class."""

    model: torch.nn.Module
    dtype = torch.float32

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length", 0))
            if size > MAX_BYTES:
                raise ValueError(f"a request has at most {MAX_BYTES:,} bytes, got {size:,}")
            inputs = torch.tensor(json.loads(self.rfile.read(size))["inputs"], dtype=self.dtype)
            with torch.inference_mode():
                outputs = self.model(inputs)
            self.answer(200, {"outputs": outputs.tolist()})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            self.answer(400, {"error": f"{type(error).__name__}: {error}"})

    def answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a deployed model over HTTP.")
    parser.add_argument("file", help="a file of pdecay.save(deployed, file)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", action="store_true", help="inputs are integers")
    args = parser.parse_args()
    # A file with a program is loaded only if its source is trusted.
    Handler.model = pdecay.load(args.file, trusted=True)
    Handler.dtype = torch.int64 if args.tokens else torch.float32
    with ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
        print(f"serving {args.file} on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()

"""Stream an answer. Start a cluster first, in another terminal:  pdbus up   (or: pdbus up --model tiny)"""

import sys

from pdbus import Client, RequestFailed

with Client(*sys.argv[1:2]) as client:  # an address, or the usual place
    answer = client.generate("What does a load balancer do?", max_tokens=60, deadline_s=60)
    try:
        for piece in answer:
            print(piece.text, end="", flush=True)
    except RequestFailed as error:
        sys.exit(f"\n{error.code}: {error.message}")
    result = answer.result
    print(f"\n{len(result.ids)} tokens from {result.decode}, first after {result.ttft_s:.2f} s")

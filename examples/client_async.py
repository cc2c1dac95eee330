"""Several answers at once, with asyncio. Start a cluster first, in another terminal:  pdbus up"""

import asyncio
import sys

from pdbus import AsyncClient

QUESTIONS = ("Name a fruit.", "Name a river.", "Name a planet.")


async def main() -> None:
    async with AsyncClient(*sys.argv[1:2]) as client:

        async def ask(question: str) -> None:
            answer = await client.generate(question, max_tokens=20)
            text = await answer.text()
            assert answer.result is not None
            print(f"{question} {text!r} ({answer.result.prefill} -> {answer.result.decode})")

        await asyncio.gather(*map(ask, QUESTIONS))


asyncio.run(main())

"""Ask a question, then complete several prompts in one batch. Run: python examples/quickstart.py"""

from jpaged import Engine, SamplingParams

PROMPTS = ["Once upon a time", "The three primary colours are", "def fibonacci(n):\n    "]

with Engine("smollm2-135m", max_num_seqs=8, max_model_len=1024) as engine:
    answer = engine.chat([{"role": "user", "content": "What is the capital of France?"}])[0]
    print(answer.outputs[0].text)

    # A seed fixes the random draws of a request, whatever other requests share its batch.
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=40, stop=["\n\n"])
    for output in engine.generate(PROMPTS, params):
        print(repr(output.prompt), "→", repr(output.outputs[0].text))
    print(engine.stats())

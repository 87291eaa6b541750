"""The prompts of `topspin bench spec`, by kind, and the requests made of them.

Owns short texts of our own, from those whose answers repeat much of the prompt (edits, summaries
that quote) to those that share nothing with it (random token ids). Knows no server and no figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

import numpy as np

from benchmarks.load.contracts import Backend, BenchRequest
from benchmarks.load.datasets.prompts import PromptMaker
from models.text.tokenizer import Tokenizer

RANDOM: Final = "random ids"
RANDOM_TOKENS: Final = 128
PROMPTS_PER_KIND: Final = 4

_CHAT = (
    "I have moved into a flat with a small balcony that faces north-east. It gets about three "
    "hours of sun in the morning and a lot of wind. Which herbs and flowers would do well there, "
    "how large should their pots be, and what should I do with them in winter?",
    "My sister and I want to cycle along a river for five days in June, about fifty kilometres a "
    "day, with one tent and little luggage. Neither of us has done that before. What should we "
    "pack, what can we leave at home, and how do we find places for the night?",
    "Please explain to a curious twelve-year-old why the moon sometimes looks thin and sometimes "
    "round, why we always see the same side of it, and why it does not fall down. Use things that "
    "are found in a kitchen as examples, and no formulas.",
    "I play table tennis twice a week and lose most games because my returns of spin serves go "
    "into the net or far too long. I can practise alone for half an hour and with a friend for an "
    "hour. Suggest a plan for the next four weeks.",
)

_EDIT = (
    "Rename the parameter `xs` to `values`, and write the whole file again with no other change.\n"
    """
```python
import math


def mean(xs):
    if not xs:
        raise ValueError("mean of no values")
    return sum(xs) / len(xs)


def variance(xs):
    centre = mean(xs)
    return sum((x - centre) ** 2 for x in xs) / len(xs)


def deviation(xs):
    return math.sqrt(variance(xs))


def normalised(xs):
    centre, width = mean(xs), deviation(xs)
    return [(x - centre) / width for x in xs]
```
""",
    "Add type annotations to every function and write the complete file again.\n"
    """
```python
class Inventory:
    def __init__(self):
        self.counts = {}

    def add(self, name, count):
        if count < 1:
            raise ValueError("count must be 1 or more")
        self.counts[name] = self.counts.get(name, 0) + count

    def remove(self, name, count):
        left = self.counts.get(name, 0) - count
        if left < 0:
            raise ValueError("not enough of " + name)
        self.counts[name] = left

    def total(self):
        return sum(self.counts.values())
```
""",
    "In this page change the title to `Opening hours`, and close the shop on Mondays. Write the "
    "whole page again.\n"
    """
```html
<html>
  <head>
    <title>Hours</title>
  </head>
  <body>
    <h1>When are we open?</h1>
    <table>
      <tr><td>Monday</td><td>9 to 17</td></tr>
      <tr><td>Tuesday</td><td>9 to 17</td></tr>
      <tr><td>Wednesday</td><td>9 to 17</td></tr>
      <tr><td>Thursday</td><td>9 to 19</td></tr>
      <tr><td>Friday</td><td>9 to 19</td></tr>
      <tr><td>Saturday</td><td>10 to 14</td></tr>
    </table>
  </body>
</html>
```
""",
    "`pop` must return None if the queue is empty. Correct it, and write the whole file again.\n"
    """
```c
#include <stdlib.h>

struct node {
    void *value;
    struct node *next;
};

struct queue {
    struct node *first;
    struct node *last;
};

void push(struct queue *queue, void *value) {
    struct node *node = malloc(sizeof(struct node));
    node->value = value;
    node->next = NULL;
    if (queue->last)
        queue->last->next = node;
    else
        queue->first = node;
    queue->last = node;
}

void *pop(struct queue *queue) {
    struct node *node = queue->first;
    void *value = node->value;
    queue->first = node->next;
    free(node);
    return value;
}
```
""",
)

_SUMMARY = (
    "Summarise these minutes. Quote every decision word for word.\n\n"
    "The committee of the garden club met on the third of March with nine members. The treasurer "
    "reported that the new pump had cost more than was planned, since the old pipe had to be "
    "replaced as well. It was decided that the club shall buy no further tools before September. "
    "Some members asked whether the lower gate could stay open in the evening. It was decided that "
    "the lower gate shall be locked at nine o'clock from April to October. The plan for the open "
    "day was discussed at length, and postponed. It was decided that every member shall bring two "
    "plants for the exchange in May.",
    "Which sentences of this report give a cause? Copy them exactly, one per line.\n\n"
    "The ferry left the harbour eleven minutes late. The delay was caused by a lorry whose brakes "
    "had locked on the ramp. Two cars had to wait for the next crossing. The wind rose during the "
    "afternoon. The last crossing was cancelled because the waves at the northern pier were higher "
    "than two metres. Forty passengers were brought to the village by bus. The bus was full "
    "because a school class had missed the earlier one. All passengers arrived before ten.",
    "Shorten this text to half its length. Keep the sentences that remain unchanged.\n\n"
    "A lighthouse keeper used to climb the stairs four times a night. At dusk the lamp was lit and "
    "the glass was wiped. Two hours later the clockwork that turned the lens was wound up again. "
    "At midnight the oil was measured and written into a book. Before dawn the clockwork was wound "
    "up once more. In the morning the lamp was put out and curtains were drawn around the lens, "
    "because the sun, gathered by the lens, could set fire to the room. Today a small electric "
    "motor and a sensor do all this, and a technician comes twice a year.",
    "List each product of this letter with the exact words that describe it.\n\n"
    "Dear customers, this spring we offer three new teas. Morning Hill is a strong black tea with "
    "a taste of malt and dried fruit. Quiet Lake is a light green tea with a taste of fresh grass "
    "and a little lemon. Evening Path is a red infusion without caffeine, with a taste of orange "
    "peel and cinnamon. Each tea is sold in tins of one hundred grams. Last year's tins can be "
    "returned to the shop and filled again at a lower price. With kind regards, your tea shop.",
)

_JSON = (
    "Turn this list into a JSON array of objects with the keys name, country, length_km and mouth. "
    "Answer with JSON only.\n\n"
    "Danube, Germany, 2850 km, Black Sea\nRhine, Switzerland, 1233 km, North Sea\n"
    "Loire, France, 1006 km, Atlantic Ocean\nEbro, Spain, 930 km, Mediterranean Sea\n"
    "Po, Italy, 652 km, Adriatic Sea\nThames, England, 346 km, North Sea\n"
    "Vistula, Poland, 1047 km, Baltic Sea\n",
    "Write five more objects of this kind, with other numbers and names. Answer with JSON only.\n\n"
    '{"orders": [\n'
    '  {"id": 1001, "customer": {"name": "Ada", "city": "Oslo"}, "items": 3, "paid": true},\n'
    '  {"id": 1002, "customer": {"name": "Ben", "city": "Riga"}, "items": 1, "paid": false},\n'
    '  {"id": 1003, "customer": {"name": "Cleo", "city": "Porto"}, "items": 7, "paid": true}\n'
    "]}\n",
    "Give the weather of each day as JSON, with the keys day, low_celsius, high_celsius, wind_kmh "
    "and sky. Answer with JSON only.\n\n"
    "Monday begins clear at 4 degrees and reaches 15, with 10 km/h of wind. Tuesday is cloudy, 7 "
    "to 13 degrees, with 22 km/h. On Wednesday it rains all day, 8 to 11 degrees, with 35 km/h. "
    "Thursday is cloudy again, 6 to 12 degrees and 18 km/h. Friday is clear, from 3 to 16 degrees, "
    "with 8 km/h of wind.",
    "Correct this JSON, which lacks quotes and commas, and answer with all of the JSON.\n\n"
    '{\n  name: "reading room",\n  "seats": 24\n  "open": {"from": 9 "to": 20},\n'
    '  "lamps": [\n    {"row": 1, "watts": 12} \n    {"row": 2, "watts": 12},\n'
    '    {row: 3, "watts": 15}\n  ]\n  "rules": ["no food", "no calls" "bags in the lockers"]\n}\n',
)

_WEATHER_TOOL = (
    '{"name": "get_weather", "parameters": {"city": "string", "day": "string", '
    '"unit": "celsius or fahrenheit"}}'
)
_MAIL_TOOL = (
    '{"name": "send_mail", "parameters": {"to": "string", "subject": "string", "body": "string"}}'
)
_TRAIN_TOOL = (
    '{"name": "find_trains", "parameters": {"from": "string", "to": "string", "date": '
    '"YYYY-MM-DD", "after": "HH:MM", "passengers": "integer"}}'
)
_CALLS = (
    'Call tools by one JSON object per line: {"name": ..., "arguments": {...}}. Write nothing '
    "else. The tools are:\n"
)

_TOOLS = (
    f"{_CALLS}{_WEATHER_TOOL}\n{_MAIL_TOOL}\n\nExample:\n"
    '{"name": "get_weather", "arguments": {"city": "Bergen", "day": "today", "unit": "celsius"}}\n'
    "\nUser: What will the weather be tomorrow in Lisbon, Vienna, Tallinn and Athens, in celsius?",
    f"{_CALLS}{_MAIL_TOOL}\n\nUser: Write to anna@example.org, bert@example.org and "
    "carla@example.org. The subject is always 'Meeting on Thursday', and the body is 'We meet at "
    "ten in the reading room on the second floor. Please bring your notes of last week.'",
    f"{_CALLS}{_TRAIN_TOOL}\n\nExample:\n"
    '{"name": "find_trains", "arguments": {"from": "Graz", "to": "Linz", "date": "2026-05-02", '
    '"after": "08:00", "passengers": 2}}\n\nUser: Two of us go from Linz to Prague on the fourth '
    "of May 2026 after nine, on to Dresden on the sixth after eleven, and back from Dresden to "
    "Linz on the ninth after half past two in the afternoon.",
    f"{_CALLS}{_WEATHER_TOOL}\n{_TRAIN_TOOL}\n{_MAIL_TOOL}\n\nUser: Look up the weather in Turin "
    "on Saturday and on Sunday in celsius, find trains for three passengers from Milan to Turin on "
    "2026-06-13 after 07:30, and mail dora@example.org with the subject 'Turin' that we are "
    "coming.",
)

TEXTS: Final[dict[str, tuple[str, ...]]] = {
    "chat": _CHAT,
    "code edit": _EDIT,
    "summary": _SUMMARY,
    "json": _JSON,
    "tool call": _TOOLS,
}
KINDS: Final = (*TEXTS, RANDOM)


def backend_of(kind: str, *, has_chat_template: bool) -> Backend:
    """Return the endpoint of a kind: token ids and base models have completions only."""
    return "openai-chat" if has_chat_template and kind != RANDOM else "openai"


def requests_of(
    kind: str,
    count: int,
    *,
    backend: Backend,
    output_len: int,
    tokenizer: Tokenizer,
    salt: str,
    seed: Sequence[int],
) -> list[BenchRequest]:
    """Return `count` greedy requests of a kind, the same ones for the same arguments.

    Texts repeat after the last one. Each repetition has a `cache_salt` of its own, made from
    `salt`: a drafter that has seen an answer would otherwise foresee all of the next one.
    `tokenizer` and `seed` serve the random token ids.
    """
    prompts: list[str | list[int]] = []
    if kind == RANDOM:
        maker = PromptMaker(tokenizer, vocab_size=None, as_text=False)
        rng = np.random.default_rng(seed)
        prompts += [maker.draw(rng, RANDOM_TOKENS) for _ in range(count)]
    else:
        prompts += islice(cycle(TEXTS[kind]), count)
    found = []
    for idx, prompt in enumerate(prompts):
        extra = {"temperature": 0.0, "cache_salt": f"{salt}/{idx // PROMPTS_PER_KIND}"}
        if backend == "openai-chat":
            messages = [{"role": "user", "content": prompt}]
            found.append(BenchRequest(messages=messages, max_tokens=output_len, extra_body=extra))
        else:
            found.append(BenchRequest(prompt=prompt, max_tokens=output_len, extra_body=extra))
    return found

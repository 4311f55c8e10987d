"""Prompts for texts that train a draft model: chat, code and prose from templates and this Python.

Code begins modules of the standard library, prose paragraphs of docstrings in installed packages;
questions are made from lists of topics and from docstrings. Prompts are split by a hash of their
source, so that no module, paragraph or topic is in both parts.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corpus import is_held_out, library_files

KINDS = ("chat", "code", "prose")
TOPICS = """
volcanoes, the French Revolution, black holes, sourdough bread, the stock market, chess openings,
photosynthesis, climate change, electric cars, ancient Rome, jazz music, the human heart, honey
bees, time zones, public speaking, machine learning, the water cycle, vaccines, coral reefs,
insomnia, job interviews, mountain climbing, gardening in a small flat, learning Spanish, the moon
landing, inflation, meditation, the immune system, dinosaurs, renewable energy, the printing press,
coffee, home networks, password managers, budgeting for students, marathon training, whales,
gravity, the Great Wall of China, poetry, antibiotics, dreams, wine making, blockchain, the Olympic
Games, glaciers, opera, friendship, small talk, earthquakes, the periodic table, bicycles,
Shakespeare, quantum computers, cats, puppies, road trips, recycling, rain forests, nutrition,
astronomy, tea, the Industrial Revolution, negotiation, prime numbers, statistics, probability,
triangles, fractions, databases, sorting algorithms, unit tests, version control, operating
systems, compilers, web servers, recursion, hash tables, encryption, neural networks, regular
expressions, spreadsheets, robots, drones, time management, procrastination, teamwork, remote work,
salary talks, writing emails, presentations, first aid, headaches, stretching, healthy breakfasts,
vegetarian dinners, soup, chocolate cake, pasta, knitting, photography, painting with watercolors,
guitar practice, film noir, science fiction novels, fairy tales, Greek mythology, the Silk Road,
Vikings, samurai, pyramids, Marie Curie, Isaac Newton, Leonardo da Vinci, Nelson Mandela,
democracy, human rights, supply and demand, taxes, insurance, the United Nations, languages of the
world, handwriting, maps, bridges, trains, airplanes, submarines, lighthouses, deserts, rivers,
oceans, islands, weather forecasts, thunderstorms, rainbows, snow, stars, Mars, satellites,
telescopes, batteries, magnets, lasers, plastics, steel, glass, paper, cotton, sleep, memory,
emotions, empathy, stress, habits, happiness, parenting, teaching, exams, libraries, museums,
festivals, weddings, moving house, renting a room, buying a used car, camping, fishing, swimming,
yoga, football, tennis, board games, magic tricks, jokes, riddles, crossword puzzles, origami,
candles, soap
"""
QUESTIONS = """
Explain {} to a child.
What should everyone know about {}?
Give me five facts about {}.
Write a short poem about {}.
Write a short story about {}.
What are common misconceptions about {}?
I want to learn more about {}. Where do I start?
Summarize the most important points about {}.
What are the advantages and disadvantages of {}?
Write an email to a friend about {}.
Make a table that compares three aspects of {}.
Why do people care about {}?
How did {} change over time?
Give me step by step advice on {}.
Write a dialogue between a teacher and a student about {}.
What questions would an expert ask about {}?
Suggest ten titles for an article about {}.
Write the introduction of an essay on {}.
Tell me about {}.
How does {} work?
Create a quiz with four questions and answers about {}.
What is the history of {}?
Rewrite this in formal language: "I really don't get {} but it's kinda cool."
List tools or things that are needed for {}.
What is the best book or film about {}, and why?
Can you help me plan a workshop on {}?
Write a tweet, a headline and a slogan about {}.
"""
OPENINGS = """
Most people first hear of {} in school, but
The history of {} begins with
Once upon a time, in a town that was famous for {},
"I never understood {}," said the old man,
In this article we look at {} and
When she thought of {}, she remembered
There are three things to know about {}. First,
Chapter 1: {}\\n\\n
The report on {} was published on Monday, and
{} is one of the subjects that
"""
REQUESTS = (
    "Write a Python function `{name}`. Its docstring is: {doc}",
    "Implement `{name}` in Python: {doc}",
    "How would you write a function in Python with this description? {doc}",
    "Write unit tests for a Python function `{name}`, described as: {doc}",
    "What does this Python function do?\n\n```python\n{source}\n```",
    "Rewrite this code to be easier to read:\n\n```python\n{source}\n```",
)
MIN_PARAGRAPH = 240  # characters
MAX_SOURCE = 500  # characters of a function in a question
MAX_FILES = 300  # of a package
PROSE = re.compile(r"[A-Z][^<>{}=|*_#@\\[\]]*[.]")
PACKAGES = ("numpy", "scipy", "sympy", "networkx", "matplotlib", "torch", "transformers")


@dataclass(frozen=True)
class TrainingPrompt:
    """Prompt of a text: a question for the chat template, or the beginning of a text."""

    kind: str
    text: str
    is_question: bool


def training_prompts(seed: int, held_out: bool) -> Iterator[TrainingPrompt]:
    """Yield prompts of every kind in turn, without end."""
    streams = {kind: PROMPTS[kind](random.Random(f"{seed} {kind}"), held_out) for kind in KINDS}
    while True:
        for kind in KINDS:
            yield next(streams[kind])


def _lines(text: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in text.strip().split("\n")]


def _topics(held_out: bool) -> list[str]:
    topics = re.split(r",\s*", TOPICS.strip())
    return [topic for topic in topics if is_held_out(topic) == held_out]


def _chat(rng: random.Random, held_out: bool) -> Iterator[TrainingPrompt]:
    questions, topics = _lines(QUESTIONS), _topics(held_out)
    while True:
        text = rng.choice(questions).format(rng.choice(topics))
        yield TrainingPrompt("chat", text, True)


def _code(rng: random.Random, held_out: bool) -> Iterator[TrainingPrompt]:
    """Yield a question about a function and the beginning of a piece of a module in turn."""
    modules = [
        text
        for name, text in library_files()
        if is_held_out(name) == held_out and not name.startswith("test/")
    ]
    rng.shuffle(modules)
    while True:
        for text in modules:
            functions = list(_functions(text))
            if functions:
                yield TrainingPrompt(
                    "code", rng.choice(REQUESTS).format(**rng.choice(functions)), True
                )
            pieces = [piece for piece in text.split("\n\n\n") if len(piece) >= MIN_PARAGRAPH]
            if pieces:
                yield TrainingPrompt("code", rng.choice(pieces), False)


def _functions(text: str) -> Iterator[dict[str, str]]:
    """Yield name, docstring and source of the functions of a module that have a docstring."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
        if len(source) <= MAX_SOURCE:
            yield {"name": node.name, "doc": doc.split("\n\n")[0], "source": source}


def _prose(rng: random.Random, held_out: bool) -> Iterator[TrainingPrompt]:
    """Yield the opening of a story or report and the beginning of a paragraph in turn."""
    openings, topics = _lines(OPENINGS), _topics(held_out)
    paragraphs = [text for text in _paragraphs() if is_held_out(text) == held_out]
    rng.shuffle(paragraphs)
    while True:
        for paragraph in paragraphs:
            opening = rng.choice(openings).format(rng.choice(topics))
            yield TrainingPrompt("prose", opening[0].upper() + opening[1:], False)
            yield TrainingPrompt("prose", paragraph, False)


def _paragraphs() -> list[str]:
    """Return the paragraphs of docstrings in the library and in installed packages."""
    texts = [text for _, text in library_files()]
    for package in PACKAGES:
        if (spec := importlib.util.find_spec(package)) is None or spec.origin is None:
            continue
        for path in sorted(Path(spec.origin).parent.rglob("*.py"))[:MAX_FILES]:
            texts.append(path.read_text("utf-8", errors="replace"))
    paragraphs: dict[str, None] = {}
    for docstring in re.findall(r'"""(.*?)"""', "\n".join(texts), re.DOTALL):
        for paragraph in textwrap.dedent(docstring).split("\n\n"):
            paragraph = " ".join(paragraph.split())
            if len(paragraph) >= MIN_PARAGRAPH and PROSE.fullmatch(paragraph):
                paragraphs[paragraph] = None
    return list(paragraphs)


PROMPTS = {"chat": _chat, "code": _code, "prose": _prose}

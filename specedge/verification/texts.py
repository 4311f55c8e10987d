"""The prompts of every audit: of several kinds, so that some are sure of their next tokens and
others are not, to whatever models.
"""

BUILT_IN = (
    "def read_config(path):",
    "The three laws of robotics are",
    "import ",
    "Once upon a time there was a",
    "class Parser:\n    def __init__(self",
    "Question: What is the capital of France?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "In the beginning",
    'raise ValueError("',
    "Der schnelle braune Fuchs springt",
    '{"name": "specedge", "version":',
    "for i in range(10):\n    if i % 2:\n        ",
    "Dear Sir or Madam,\n\n",
    "#include <stdio.h>\n\nint main(",
    "今日は天気が",
    "SELECT name, count(*) FROM",
)

ASKED = "_ARGCOMPLETE"
"""The variable by which a shell asks for completions: the number of the word that is the program."""

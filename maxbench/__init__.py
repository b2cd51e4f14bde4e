"""How fast does a cluster pre-train large language models, and is that as fast as it should be?"""

"""The scheduler rank once more, from the rules, in plain Python with lists and dicts: slow and obvious.

Prompt blocks are tuples of their content, a cache is a dict from chains of blocks to block numbers.
"""

from dataclasses import dataclass, field


@dataclass
class Request:
    name: int
    prompt: list
    output: int
    priority: int = 0
    order: int = 0
    generated: int = 0
    computed: int = 0
    blocks: list = field(default_factory=list)
    preempted: bool = False

    @property
    def known(self):
        return len(self.prompt) + self.generated

    def content(self, position):
        return self.prompt[position] if position < len(self.prompt) else (self.name, position)


class Reference:
    def __init__(self, case):
        self.requests = [
            Request(name, prompt, output, priority)
            for name, (prompt, output, priority) in enumerate(
                zip(case["prompts"], case["outputs"], case["priority"], strict=True)
            )
        ]
        self.vllm = case["rules"] == "vllm"
        self.num_blocks = case["num_gpu_blocks"] - self.vllm
        self.block_size = case["block_size"]
        self.max_num_seqs = case["max_num_seqs"]
        self.max_budget = case["budget"]
        self.caching = case["caching"]
        self.chunked = case["chunked"]
        self.fifo = case["fifo"]
        self.by_priority = case["by_priority"]
        self.threshold = case["threshold"]
        self.running, self.waiting = [], []
        self.holders = {}  # block -> requests that hold it
        self.published = {}  # block -> chain, in order of publication
        self.evictable = []  # free published blocks, next to be evicted first
        self.next_block = 0

    # KV cache

    def free(self):
        return self.num_blocks - len(self.holders)

    def chain(self, request, block):
        return tuple(request.content(position) for position in range((block + 1) * self.block_size))

    def hits(self, request, max_tokens):
        found = []
        for block in range(max_tokens // self.block_size if self.caching else 0):
            copies = [b for b, chain in self.published.items() if chain == self.chain(request, block)]
            if not copies:
                break
            found.append(copies[0])
        return found

    def need(self, tokens, hits):
        fresh = max(0, -(-tokens // self.block_size) - len(hits))
        return fresh + sum(1 for block in hits if block not in self.holders)

    def extend(self, request, tokens):
        needed = -(-tokens // self.block_size) - len(request.blocks)
        if needed > self.free():
            return False
        for _ in range(needed):
            if len(self.holders) + len(self.evictable) == self.num_blocks:
                del self.published[self.evictable.pop(0)]
            self.next_block += 1
            self.holders[self.next_block] = [request]
            request.blocks.append(self.next_block)
        return True

    def take_hits(self, request, hits):
        for block in hits:
            if block in self.evictable:
                self.evictable.remove(block)
            self.holders.setdefault(block, []).append(request)
            request.blocks.append(block)

    def publish(self, request):
        for block in range(request.computed // self.block_size if self.caching else 0):
            self.published.setdefault(request.blocks[block], self.chain(request, block))

    def release(self, request):
        for block in reversed(request.blocks):
            self.holders[block].remove(request)
            if not self.holders[block]:
                del self.holders[block]
                if block in self.published:
                    self.evictable.append(block)
        request.blocks = []

    # Queues

    def key(self, request):
        return request.priority, request.order

    def queue(self, request):
        if self.by_priority:
            self.waiting.append(request)
            self.waiting.sort(key=self.key)
        elif request.preempted:
            self.waiting.insert(0, request)
        else:
            self.waiting.append(request)

    def preempt(self):
        newest_or_oldest = self.running[0 if self.fifo else -1]
        victim = max(self.running, key=self.key) if self.by_priority else newest_or_oldest
        self.running.remove(victim)
        self.budget += self.tokens.pop(victim.name, 0)
        self.release(victim)
        victim.computed, victim.preempted = 0, True
        self.queue(victim)
        self.preempted.append(victim.name)
        return victim

    # A pass

    def schedule(self):
        self.budget, self.tokens, self.reused, self.preempted, self.rejected = self.max_budget, {}, {}, [], []
        alone = len(self.running) + len(self.waiting) == 1
        limit = self.threshold if self.threshold and not alone else 10**9
        index = 0
        while index < len(self.running) and self.budget > 0:
            request = self.running[index]
            if not self.vllm and self.must_wait(request, request.computed, limit):
                return
            tokens = min(request.known - request.computed, limit, self.budget)
            before = list(self.running[:index])
            while request in self.running and not self.extend(request, request.computed + tokens):
                self.preempt()
            if request not in self.running:
                if self.vllm:
                    return
                continue
            self.commit(request, tokens)
            if self.vllm:  # the simulator skips as many requests as left before the current one
                index -= sum(1 for other in before if other not in self.running)
            index += 1
        if not self.preempted:
            self.admit(limit)

    def admit(self, limit):
        while self.waiting and len(self.running) < self.max_num_seqs:
            if self.vllm and self.budget == 0:
                return
            request = self.waiting[0]
            if not self.vllm and not request.preempted and not self.fits_ever(request):
                self.rejected.append(self.waiting.pop(0).name)
                continue
            silent = not self.vllm and request.output == 0
            hits = self.hits(request, request.known - (0 if silent else 1))
            cached = len(hits) * self.block_size
            if self.need(request.known, hits) > self.free():
                return
            if self.must_wait(request, cached, limit):
                return
            tokens = min(request.known - cached, limit, self.budget)
            if tokens == 0 and request.known > cached:
                return
            self.waiting.pop(0)
            self.running.append(request)
            self.take_hits(request, hits)
            self.extend(request, cached + tokens)
            request.computed = cached
            self.reused[request.name] = cached
            self.commit(request, tokens)
            if tokens == 0 and self.budget == 0:
                return

    def must_wait(self, request, computed, limit):
        end = request.known if self.vllm else len(request.prompt)
        return not self.chunked and min(end - computed, limit) > self.budget

    def fits_ever(self, request):
        return -(-len(request.prompt) // self.block_size) <= self.num_blocks

    def commit(self, request, tokens):
        self.tokens[request.name] = tokens
        self.budget -= tokens
        request.computed += tokens
        self.publish(request)

    def complete(self):
        ready = [self.requests[name] for name in self.tokens]
        ready = [request for request in ready if request.computed == request.known]
        finished = [request for request in ready if request.output == 0]
        emitted = [request for request in ready if request.output > 0]
        for request in emitted:
            request.generated += 1
            if request.generated == request.output:
                finished.append(request)
        for request in finished:
            self.release(request)
            self.running.remove(request)
        return [request.name for request in emitted], [request.name for request in finished]

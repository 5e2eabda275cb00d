// SPDX-License-Identifier: MIT
/*
 * The functions that kernels can be. Parameters arrive as 64-bit words. Every access is checked
 * first: memory that the GPU could not reach is a fault, not a crash of the process.
 */
#include <string.h>
#include <unistd.h>

#include "standin.h"

#define PAGE_BYTES ((size_t)2 << 20)

/* The way to memory that the context may access; NULL after a stray access, absorbed or not. */
static void *reach(uint64_t address, size_t size, enum access access)
{
	void *pointer;
	size_t can;

	pthread_mutex_lock(&gpu_lock);
	can = accessible(address, size, access, working_for);
	if (can < size) {
		CUresult deadly = backend->fault(address + can, access);

		if (deadly != CUDA_SUCCESS)
			kill_context(working_for, deadly);
	}
	pointer = can == size ? gpu_pointer(address) : NULL;
	pthread_mutex_unlock(&gpu_lock);
	return pointer;
}

static void nothing(const uint64_t *arguments)
{
	(void)arguments;
}

/* handle of a condition, at, value: the word there becomes so much less, and the condition is what it is then */
static void condition(const uint64_t *arguments)
{
	uint32_t *at = reach(arguments[1], sizeof(*at), ACCESS_WRITE);

	if (!at)
		return;
	*at -= (uint32_t)arguments[2];
	__atomic_store_n(&((struct condition *)(uintptr_t)arguments[0])->value, *at, __ATOMIC_RELEASE);
}

/* to, words, value */
static void fill(const uint64_t *arguments)
{
	uint32_t *to = reach(arguments[0], arguments[1] * sizeof(*to), ACCESS_WRITE);

	for (uint64_t i = 0; to && i < arguments[1]; i++)
		to[i] = (uint32_t)arguments[2];
}

/* to, words, value */
static void add(const uint64_t *arguments)
{
	uint32_t *to = reach(arguments[0], arguments[1] * sizeof(*to), ACCESS_WRITE);

	for (uint64_t i = 0; to && i < arguments[1]; i++)
		to[i] += (uint32_t)arguments[2];
}

/* to, from, words */
static void copy(const uint64_t *arguments)
{
	size_t size = arguments[2] * sizeof(uint32_t);
	const void *from = reach(arguments[1], size, ACCESS_READ);
	void *to = from ? reach(arguments[0], size, ACCESS_WRITE) : NULL;

	if (to)
		memmove(to, from, size);
}

/* to (one 64-bit word), from, words */
static void sum(const uint64_t *arguments)
{
	const uint32_t *from = reach(arguments[1], arguments[2] * sizeof(*from), ACCESS_READ);
	uint64_t *to = from ? reach(arguments[0], sizeof(*to), ACCESS_WRITE) : NULL, total = 0;

	if (!to)
		return;
	for (uint64_t i = 0; i < arguments[2]; i++)
		total += from[i];
	*to = total;
}

/* to, value: one word, wherever that is */
static void store(const uint64_t *arguments)
{
	uint32_t *to = reach(arguments[0], sizeof(*to), ACCESS_WRITE);

	if (to)
		*to = (uint32_t)arguments[1];
}

/* to (a word that has the address of another one), value */
static void follow(const uint64_t *arguments)
{
	const uint64_t *at = reach(arguments[0], sizeof(*at), ACCESS_READ);
	uint32_t *to = at ? reach(*at, sizeof(*to), ACCESS_WRITE) : NULL;

	if (to)
		*to = (uint32_t)arguments[1];
}

/* The module's first variable is one more than it was. */
static void count(const uint64_t *arguments)
{
	uint32_t *counter = reach(arguments[HIDDEN_ARGUMENTS + 1], sizeof(*counter), ACCESS_WRITE);

	if (counter)
		++*counter;
}

/* base, sums: what the kernel of src/exact/pages.c does; to be told from one another, other sums do as well */
static void page_sums(const uint64_t *arguments)
{
	uint64_t *sums = reach(arguments[1], arguments[HIDDEN_ARGUMENTS] * sizeof(*sums), ACCESS_WRITE);
	size_t words = PAGE_BYTES / sizeof(uint64_t);

	for (uint64_t page = 0; sums && page < arguments[HIDDEN_ARGUMENTS]; page++) {
		const uint64_t *from = reach(arguments[0] + page * PAGE_BYTES, PAGE_BYTES, ACCESS_READ);

		/* Most of it is nothing but zeros. */
		if (!from || (!*from && !memcmp(from, from + 1, PAGE_BYTES - sizeof(*from))))
			continue;
		for (size_t i = 0; i < words; i++) {
			uint64_t word = (from[i] + i) * 0x9e3779b97f4a7c15u;

			sums[page] += word ^ word >> 32;
		}
	}
}

/* The word there (0: none) says that it has ended. */
static void mark(uint64_t address, uint32_t value)
{
	uint32_t *word = address ? reach(address, sizeof(*word), ACCESS_WRITE) : NULL;

	if (word)
		__atomic_store_n(word, value, __ATOMIC_RELEASE);
}

#define SAVED_AT_ONCE 16

/*
 * ranges (to, from, size), one for each row of blocks; a word (or 0), and two halves: what it is to be, and which of the kernel's
 * counters. What the kernel of src/exact/saver.c does.
 */
static void save_ranges(const uint64_t *arguments)
{
	const uint64_t *marked = arguments + 3 * SAVED_AT_ONCE;
	bool is_there = true;

	for (uint64_t row = 0; row < arguments[HIDDEN_ARGUMENTS + 2]; row++) {
		const uint64_t *range = arguments + 3 * row;
		const void *from = reach(range[1], range[2], ACCESS_READ);
		void *to = from ? reach(range[0], range[2], ACCESS_WRITE) : NULL;

		if (to)
			memcpy(to, from, range[2]);
		is_there &= to != NULL;
	}
	/* A kernel that has met a fault does nothing more. */
	if (is_there)
		mark(*marked, (uint32_t)marked[1]);
}

/* to, from, a word (or 0), and two halves: how many bytes, and what it is to be. What the kernel of src/exact/copier.c does. */
static void copy_bytes(const uint64_t *arguments)
{
	size_t size = (uint32_t)arguments[3];
	const void *from = reach(arguments[1], size, ACCESS_READ);
	void *to = from ? reach(arguments[0], size, ACCESS_WRITE) : NULL;

	if (!to)
		return;
	memmove(to, from, size);
	mark(arguments[2], (uint32_t)(arguments[3] >> 32));
}

/* kept, fresh, differs, ranges (first, end), one for each block: what the kernel of src/exact/sums.c does */
static void sums_differ(const uint64_t *arguments)
{
	uint32_t *differs = reach(arguments[2], sizeof(*differs), ACCESS_WRITE);

	for (uint64_t block = 0; differs && block < arguments[HIDDEN_ARGUMENTS]; block++) {
		const uint64_t *range = arguments + 3 + 2 * block;
		uint64_t offset = range[0] * sizeof(uint64_t), size = (range[1] - range[0]) * sizeof(uint64_t);
		const void *kept = reach(arguments[0] + offset, size, ACCESS_READ);
		const void *fresh = kept ? reach(arguments[1] + offset, size, ACCESS_READ) : NULL;

		if (fresh && memcmp(kept, fresh, size) != 0)
			*differs = 1;
	}
}

/* end, unused, value: the word before that address becomes so much more */
static void before(const uint64_t *arguments)
{
	uint32_t *to = reach(arguments[0] - sizeof(*to), sizeof(*to), ACCESS_WRITE);

	if (to)
		*to += (uint32_t)arguments[2];
}

/* at, unused, value: until the word there is that */
static void await(const uint64_t *arguments)
{
	uint32_t *at;

	while (!working_for->broken && !backend->is_halted() && (at = reach(arguments[0], sizeof(*at), ACCESS_READ)) &&
	       __atomic_load_n(at, __ATOMIC_ACQUIRE) != (uint32_t)arguments[2])
		usleep(1000);
}

static void trap(const uint64_t *arguments)
{
	CUresult deadly;

	(void)arguments;
	pthread_mutex_lock(&gpu_lock);
	deadly = backend->fault(0, ACCESS_NONE);
	working_for->has_trapped = working_for->has_trapped || !working_for->broken;
	if (deadly != CUDA_SUCCESS)
		kill_context(working_for, deadly);
	pthread_mutex_unlock(&gpu_lock);
}

#define GIVEN_AT_ONCE 12

/* addresses (or 0), in one parameter: to each word there 1 is added */
static void add_to_all(const uint64_t *arguments)
{
	for (unsigned int i = 0; i < GIVEN_AT_ONCE; i++) {
		uint32_t *at = arguments[i] ? reach(arguments[i], sizeof(*at), ACCESS_WRITE) : NULL;

		if (at)
			++*at;
	}
}

static const struct builtin builtins[] = {
	{ "nothing", 0, { 0 }, nothing },
	{ "eight", 8, { 8, 8, 8, 8, 8, 8, 8, 8 }, nothing },
	{ "fill", 3, { 8, 8, 4 }, fill },
	{ "add", 3, { 8, 8, 4 }, add },
	{ "copy", 3, { 8, 8, 8 }, copy },
	{ "condition", 3, { 8, 8, 4 }, condition },
	{ "sum", 3, { 8, 8, 8 }, sum },
	{ "store", 2, { 8, 4 }, store },
	{ "follow", 2, { 8, 4 }, follow },
	{ "before", 3, { 8, 8, 4 }, before },
	{ "await", 3, { 8, 8, 4 }, await },
	{ "add_to_all", 1, { GIVEN_AT_ONCE * 8 }, add_to_all },
	{ "trap", 0, { 0 }, trap },
	{ "count", 0, { 0 }, count },
	{ "page_sums", 2, { 8, 8 }, page_sums },
	{ "save_ranges", 1, { 400 }, save_ranges },
	{ "copy_bytes", 1, { 32 }, copy_bytes },
	{ "sums_differ", 1, { 376 }, sums_differ },
};

const struct builtin *find_builtin(const char *name)
{
	for (size_t i = 0; i < sizeof(builtins) / sizeof(*builtins); i++)
		if (!strcmp(builtins[i].name, name))
			return &builtins[i];
	return NULL;
}

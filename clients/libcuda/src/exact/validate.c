// SPDX-License-Identifier: MIT
/*
 * MPSD_FAILOVER_VALIDATE=1: whether what operations write is what is saved before them. After each one the GPU comes
 * to rest, and every page of the window is compared with what it was; a page that changed and was not saved is an
 * operation's that follows pointers which its parameters do not show. Slow, and for tests of programs alone.
 */
#include <stdlib.h>
#include <string.h>

#include "exact/state.h"
#include "windows.h"

#define MOST_NAMES 256

static uint64_t *hashes;		/* of each page of the first window, as it was last seen; 0: not mapped */
static char *buffer;
static uint64_t looks, strays;
static const void *told[MOST_NAMES];
static unsigned int told_count;

bool mpsd_validates(void)
{
	static int is = -1;

	if (is < 0) {
		const char *given = secure_getenv("MPSD_FAILOVER_VALIDATE");

		is = given && !strcmp(given, "1");
	}
	return is;
}

/* FNV-1a over words, offset so that it is never 0. */
static uint64_t hash_of(const char *bytes)
{
	uint64_t hash = 0xcbf29ce484222325u;

	for (size_t i = 0; i < MPSD_EXACT_PAGE; i += sizeof(uint64_t)) {
		uint64_t word;

		memcpy(&word, bytes + i, sizeof(word));
		hash = (hash ^ word) * 0x100000001b3u;
	}
	return hash | 1;
}

static const char *name_of(const struct mpsd_op *op)
{
	const char *name = NULL;
	bool is = op->kind == MPSD_OP_LAUNCH && mpsd_tables()->real[MPSD_cuFuncGetName];

	if (is && real_cuFuncGetName(&name, mpsd_native(op->launch.function)) == CUDA_SUCCESS && name)
		return name;
	return op->kind == MPSD_OP_LAUNCH ? "a kernel" : op->kind == MPSD_OP_GRAPH ? "a graph" : "a copy, memset or memory operation";
}

static void tell(const struct mpsd_op *op, uint64_t address)
{
	const void *key = op->kind == MPSD_OP_LAUNCH ? (const void *)op->launch.function : op;

	strays++;
	for (unsigned int i = 0; i < told_count; i++)
		if (told[i] == key)
			return;
	if (told_count < MOST_NAMES)
		told[told_count++] = key;
	mpsd_say("%s writes at 0x%llx, where its parameters do not lead: it cannot be undone", name_of(op),
		 (unsigned long long)address);
}

/* One piece; `op` NULL: nothing has happened yet. */
static void look_at(const struct arena_range *piece, uint64_t base, const struct mpsd_op *op)
{
	for (uint64_t at = piece->base; at < piece->base + piece->size; at += MPSD_EXACT_PAGE) {
		uint64_t page = (at - base) / MPSD_EXACT_PAGE, hash;

		if (real_cuMemcpyDtoH_v2(buffer, at, MPSD_EXACT_PAGE) != CUDA_SUCCESS)
			return;
		hash = hash_of(buffer);
		if (op && hashes[page] && hash != hashes[page] && !mpsd_undo_is_saved(at))
			tell(op, at);
		hashes[page] = hash;
	}
}

/* A copy of the pieces' places: nothing is copied with the lock of the windows. */
static struct arena_range *find_pieces(const struct window *window, size_t *count)
{
	struct arena_range piece = { window->arena.base, 0 }, *pieces = NULL, *more;

	*count = 0;
	while (arena_next_piece(&window->arena, piece.base + piece.size, &piece)) {
		more = realloc(pieces, (*count + 1) * sizeof(*pieces));
		if (!more)
			break;
		pieces = more;
		pieces[(*count)++] = piece;
	}
	return pieces;
}

static void look(const struct mpsd_op *op)
{
	struct window *window = &mpsd_windows[0];
	struct arena_range *pieces;
	size_t count;

	pthread_mutex_lock(&mpsd_windows_lock);
	if (!hashes && window->open) {
		hashes = calloc(window->arena.granules, sizeof(*hashes));
		buffer = malloc(MPSD_EXACT_PAGE);
	}
	pieces = hashes && buffer ? find_pieces(window, &count) : NULL;
	pthread_mutex_unlock(&mpsd_windows_lock);
	for (size_t i = 0; pieces && i < count; i++)
		look_at(&pieces[i], window->arena.base, op);
	free(pieces);
}

CUresult mpsd_validate_before(void)
{
	CUresult result = mpsd_epoch_settle();

	if (result == CUDA_SUCCESS && !hashes)
		look(NULL);
	return result;
}

/* Its saves, and the room they are in, are the proxy's own doing. */
CUresult mpsd_validate_after(const struct mpsd_op *op)
{
	CUresult result = CUDA_SUCCESS;

	/* A function of the host may wait for a thread that wants the order. */
	if (op->kind == MPSD_OP_HOST || mpsd_hosts_are_open())
		return result;
	result = mpsd_lanes_mark();
	if (result == CUDA_SUCCESS)
		result = mpsd_lanes_wait();
	if (result == CUDA_SUCCESS) {
		looks++;
		look(op);
	}
	return result;
}

void mpsd_validate_report(void)
{
	if (looks)
		mpsd_say("validated: %llu operations, %llu pages written where no parameter leads",
			 (unsigned long long)looks, (unsigned long long)strays);
}

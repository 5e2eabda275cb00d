// SPDX-License-Identifier: MIT
/*
 * Room for what memory was before the epoch (undo.c): allocations in the window like the program's, so that they
 * outlive the context too.
 */
#include "exact/chunks.h"

#include <stdlib.h>

#include "clock.h"
#include "debug.h"
#include "exact/exposure.h"
#include "exact/leave.h"
#include "exact/limit.h"
#include "exact/saver.h"
#include "exact/spending.h"
#include "exact/undo.h"
#include "failover/line.h"
#include "failover/undoroom.h"
#include "memory.h"

#define MIB ((size_t)1 << 20)
#define CHUNK_BYTES (64 * MIB)
#define MOST_CHUNKS 1024
#define DEFAULT_PART 16		/* of the GPU's memory */
#define MOST_MIB (1u << 20)
#define REST_NS 20000000	/* for which who asked for it has tried once more */

static struct chunk {
	CUdeviceptr base;
	size_t size;
	bool is_last;		/* to be cut off in the copy that was left; behind the fence */
	unsigned int losses;	/* of all chunks, before this one was taken out */
} chunks[MOST_CHUNKS];
static unsigned int losses;
static unsigned int chunk_count, chunk_now;
static size_t chunk_used;		/* of chunks[chunk_now] */
static bool is_short;			/* the last one could not be had */
static atomic_uint_least64_t held;	/* bytes that all of them take, and those that are being released */
static atomic_uint_least64_t rests_until;

/* A program's warm-up may need far more than its later epochs. */
#define WINDOW_NS 30000000000ull
#define LITTLE (256 * MIB)		/* is not worth the time to allocate it again */

static size_t used_most;		/* by an epoch of this window, with the lock */
static size_t used_before;		/* of the window before */
static uint64_t window_ns, window_epoch;	/* when it began, and which epoch it was; 0: there is none yet */
static atomic_uint_least64_t needed = UINT64_MAX;

/* Pages are saved whole, or not at all. */
static size_t own_limit(void)
{
	static size_t bytes;
	size_t total = 0;

	if (bytes)
		return bytes;
	if (real_cuDeviceTotalMem_v2(&total, 0) != CUDA_SUCCESS)
		total = 0;
	total = (total / DEFAULT_PART >> 20) + CHUNK_BYTES / MIB;
	bytes = mpsd_debug_number(MPSD_DEBUG_SNAPSHOT_MIB, total, 1, 1, MOST_MIB) << 20;
	bytes = (bytes + MPSD_EXACT_PAGE - 1) / MPSD_EXACT_PAGE * MPSD_EXACT_PAGE;
	return bytes;
}

/* The daemon's limit replaces the part of the GPU's memory. A debug setting lowers either. */
static size_t budget(void)
{
	uint64_t granted = mpsd_limit();
	size_t own = own_limit();

	if (granted == MPSD_NO_LIMIT || (mpsd_debug_text(MPSD_DEBUG_SNAPSHOT_MIB) && own < granted))
		return own;
	return granted / MPSD_EXACT_PAGE * MPSD_EXACT_PAGE;
}

static void count_held(uint64_t bytes)
{
	atomic_fetch_add(&held, bytes);
	mpsd_line_wake();
}

/* With the lock. */
static bool come_to_a_place(void)
{
	while (chunk_now < chunk_count && chunk_used == chunks[chunk_now].size) {
		chunk_now++;
		chunk_used = 0;
	}
	return chunk_now < chunk_count;
}

CUdeviceptr mpsd_chunk_take(uint64_t size, uint64_t *got)
{
	CUdeviceptr at;

	/* The context that was left may still write to them. */
	if (!mpsd_undoroom_is_open() || !come_to_a_place())
		return 0;
	*got = chunks[chunk_now].size - chunk_used;
	if (*got > size)
		*got = size;
	at = chunks[chunk_now].base + chunk_used;
	chunk_used += *got;
	return at;
}

/* A chunk that was counted. After a loss of all chunks the context that was left may still write to it: it is nobody's, too. */
static void add_chunk(struct chunk chunk)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = chunk_count < MOST_CHUNKS && chunk.losses == losses;
	if (is)
		chunks[chunk_count++] = chunk;
	mpsd_word_give(&mpsd_exact_lock);
	if (!is)
		count_held(-(uint64_t)chunk.size);
}

/* With the lock. */
static struct chunk take_last_chunk(void)
{
	struct chunk chunk = chunks[--chunk_count];

	chunk.losses = losses;
	return chunk;
}

/* It may have been shut a moment ago. */
static bool has_place(void)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = come_to_a_place();
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

uint64_t mpsd_undo_bytes(void)
{
	return atomic_load(&held);
}

/* Ask for more than this snapshot needs: others follow. SUCCESS: it may be tried again. */
static CUresult raise_limit(size_t there, uint64_t size)
{
	size_t before = budget();
	CUresult result;

	mpsd_limit_want(there + (size > there ? size : there));
	result = mpsd_limit_await();
	if (result != CUDA_SUCCESS || budget() > before)
		return result;
	return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult add_room(uint64_t size)
{
	struct chunk chunk = { 0 };
	CUresult result;
	size_t there;

	result = mpsd_undoroom_await();
	if (result != CUDA_SUCCESS || has_place())
		return result;
	there = mpsd_undo_bytes();
	if (size < CHUNK_BYTES)
		size = CHUNK_BYTES;
	if (there + size > budget() && there < budget())
		size = budget() - there;
	is_short = false;
	if (chunk_count == MOST_CHUNKS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (there + size > budget())
		return raise_limit(there, size);
	mpsd_spending_of_device();
	while (mpsd_now_ns() < atomic_load(&rests_until))
		mpsd_pause(1);
	chunk.size = size;
	chunk.losses = __atomic_load_n(&losses, __ATOMIC_RELAXED);
	result = mpsd_memory_alloc_inside(&chunk.base, size, MPSD_INSIDE_ONLY);
	is_short = result == CUDA_ERROR_OUT_OF_MEMORY;
	/* While another thread captures it may be forbidden. */
	if (result != CUDA_SUCCESS)
		return result == MPSD_AGAIN || mpsd_is_loss(result) ? result : CUDA_ERROR_OUT_OF_MEMORY;
	atomic_store(&needed, UINT64_MAX);
	count_held(size);
	add_chunk(chunk);
	return CUDA_SUCCESS;
}

CUresult mpsd_chunk_more(uint64_t size)
{
	uint64_t began = mpsd_now_ns();
	CUresult result = add_room(size);

	mpsd_spending_excuse(mpsd_now_ns() - began);
	return result;
}

uint64_t mpsd_chunks_needed(void)
{
	return atomic_load(&needed);
}

/* With the lock. */
static size_t used_now(void)
{
	size_t used = chunk_used;

	for (unsigned int i = 0; i < chunk_now; i++)
		used += chunks[i].size;
	return used;
}

/* Return what an epoch of the last two windows needed at most, and begin a new window. */
static size_t end_window(void)
{
	size_t used, most;

	mpsd_word_take(&mpsd_exact_lock);
	used = used_now();
	if (used < used_most)
		used = used_most;
	most = used > used_before ? used : used_before;
	used_before = used;
	used_most = 0;
	mpsd_word_give(&mpsd_exact_lock);
	return most;
}

void mpsd_chunks_tend(void)
{
	uint64_t now = mpsd_now_ns();
	size_t most;

	if (!window_ns)
		window_ns = now;
	if (now - window_ns < WINDOW_NS)
		return;
	window_ns = now;
	/* A program that rests, or whose mode has ended, says nothing of what its epochs need. */
	if (!mpsd_exact() || window_epoch == __atomic_load_n(&mpsd_epoch.number, __ATOMIC_RELAXED))
		return;
	window_epoch = __atomic_load_n(&mpsd_epoch.number, __ATOMIC_RELAXED);
	most = end_window();
	if (mpsd_undo_bytes() < most + LITTLE || mpsd_undo_bytes() / 2 < most)
		return;
	atomic_store(&needed, most);
	mpsd_release_begin();
}

int mpsd_chunks_due_ms(void)
{
	uint64_t now = mpsd_now_ns();

	if (!window_ns || mpsd_undo_bytes() < LITTLE)
		return -1;
	return now - window_ns < WINDOW_NS ? (int)((WINDOW_NS - (now - window_ns)) / 1000000) + 1 : 0;
}

void mpsd_chunks_empty(void)
{
	size_t used = used_now();

	if (used > used_most)
		used_most = used;
	chunk_now = 0;
	chunk_used = 0;
}

static struct chunk *chunk_of(CUdeviceptr address)
{
	for (unsigned int i = 0; i < chunk_count; i++)
		if (address - chunks[i].base < chunks[i].size)
			return &chunks[i];
	return NULL;
}

bool mpsd_chunk_is(CUdeviceptr address)
{
	return chunk_of(address) != NULL;
}

#define OPEN_ROOM "snapshot memory that the old context may still write"

const char *mpsd_undo_why_not(void)
{
	if (!mpsd_undoroom_is_open())
		return OPEN_ROOM;
	return is_short ? "too little free GPU memory for the snapshot of one operation" :
			  "one operation may write more than the snapshot buffers may hold";
}

/* The chunks stay as they are, and are nobody's. */
void mpsd_exact_lose_room(void)
{
	const char *why = OPEN_ROOM;

	mpsd_word_take(&mpsd_exact_lock);
	__atomic_store_n(&losses, losses + 1, __ATOMIC_RELAXED);
	while (chunk_count)
		atomic_fetch_sub(&held, chunks[--chunk_count].size);
	mpsd_chunks_empty();
	if (!mpsd_epoch.unsure && !mpsd_lanes_all_proven()) {
		__atomic_store_n(&mpsd_epoch.unsure, why, __ATOMIC_RELAXED);
		mpsd_exposure_begin(why);
	}
	mpsd_word_give(&mpsd_exact_lock);
	mpsd_line_unsure(why);
}

/* What was not saved is saved anew in the same place, where a save that is cut off may come to its end before. */
static void keep_first(const struct mpsd_saved *copy, void *unused)
{
	struct chunk *chunk = chunk_of(copy->to);

	(void)unused;
	if (chunk)
		chunk->is_last = false;
}

static void look_behind(const struct mpsd_saved *copy, void *is)
{
	const struct chunk *chunk = chunk_of(copy->to);

	*(bool *)is |= chunk && chunk->is_last;
}

bool mpsd_chunks_are_open(void)
{
	bool is = false;

	mpsd_undo_each_open(look_behind, &is);
	return is;
}

static int compare(const void *base, const void *piece)
{
	CUdeviceptr a = *(const CUdeviceptr *)base, b = ((const struct arena_range *)piece)->base;

	return a < b ? -1 : a > b;
}

#define IS_ROOM ((uint64_t)1)	/* in a size, which is that of whole granules */

/* With the lock */
static void mark_room(struct arena_range *pieces, unsigned int count)
{
	for (unsigned int i = 0; i < chunk_count; i++)
		chunks[i].is_last = true;
	mpsd_undo_each_open(keep_first, NULL);
	for (unsigned int i = 0; i < chunk_count; i++) {
		struct chunk *chunk = &chunks[i];
		struct arena_range *piece = bsearch(&chunk->base, pieces, count, sizeof(*pieces), compare);

		chunk->is_last = chunk->is_last && piece && piece->size == chunk->size;
		if (chunk->is_last)
			piece->size |= IS_ROOM;
	}
}

unsigned int mpsd_exact_room_last(struct arena_range *pieces, unsigned int count)
{
	unsigned int first = count;

	if (!mpsd_exact() || !mpsd_exact_lock_soon())
		return count;
	mark_room(pieces, count);
	mpsd_word_give(&mpsd_exact_lock);
	for (unsigned int i = count; i-- > 0;) {
		struct arena_range piece = pieces[i];

		if (!(piece.size & IS_ROOM))
			continue;
		piece.size &= ~IS_ROOM;
		pieces[i] = pieces[--first];
		pieces[first] = piece;
	}
	return first;
}

/* First, so that nobody in the next copy saves there when a move overtakes what frees it. */
static bool take_chunk(struct chunk *chunk)
{
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	is = chunk_count && !mpsd_is_left();
	if (is)
		*chunk = take_last_chunk();
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

static CUresult free_chunk(struct chunk chunk)
{
	CUresult result = inner_cuMemFree_v2(chunk.base);

	if (result == CUDA_SUCCESS)
		count_held(-(uint64_t)chunk.size);
	else
		add_chunk(chunk);
	return result;
}

CUresult mpsd_undo_give_back(void)
{
	CUresult result = mpsd_exact() ? mpsd_epoch_settle() : CUDA_SUCCESS;
	struct chunk chunk;

	if (result == CUDA_SUCCESS)
		result = mpsd_undoroom_await();
	/* It has not ended, and freeing would wait for that. */
	if (result == CUDA_SUCCESS && mpsd_exact() && __atomic_load_n(&mpsd_epoch.unsure, __ATOMIC_RELAXED))
		return CUDA_ERROR_OUT_OF_MEMORY;
	while (result == CUDA_SUCCESS && take_chunk(&chunk))
		result = free_chunk(chunk);
	return result;
}

/* Take the last chunk if no snapshot lies in it. With the order: a thread that has chosen a place for a snapshot has it, too. */
static bool take_unused(uint64_t most, struct chunk *chunk)
{
	unsigned int used;
	bool is;

	mpsd_word_take(&mpsd_exact_lock);
	used = chunk_now + (chunk_used != 0);
	is = chunk_count > used && atomic_load(&held) > most && !mpsd_is_left();
	if (is)
		*chunk = take_last_chunk();
	mpsd_word_give(&mpsd_exact_lock);
	return is;
}

static bool take_unused_in_order(uint64_t most, struct chunk *chunk)
{
	uint64_t moves = mpsd_tables()->moves;
	bool is = mpsd_order_take(moves);

	if (is) {
		is = take_unused(most, chunk);
		mpsd_order_give(moves);
	}
	return is;
}

/* Free without the order, because cuMemFree waits for the program's work. */
CUresult mpsd_undo_release(uint64_t most)
{
	CUresult result = mpsd_undoroom_await();
	struct chunk chunk;

	while (result == CUDA_SUCCESS && take_unused_in_order(most, &chunk))
		result = free_chunk(chunk);
	return result;
}

bool mpsd_undo_has(void)
{
	return __atomic_load_n(&chunk_count, __ATOMIC_RELAXED) != 0;
}

void mpsd_undo_rest(void)
{
	atomic_store(&rests_until, mpsd_now_ns() + REST_NS);
}

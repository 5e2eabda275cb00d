// SPDX-License-Identifier: MIT
/* Streams, and how far the GPU itself says that it has come in each. */
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "clock.h"
#include "exact/pace.h"
#include "exact/spending.h"
#include "exact/undo.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/wish.h"

#define GENERATIONS 8		/* an old copy may write for a while after it was left, but not for so many moves */
#define LOOKS 4096		/* before a wait lets others have the processor */
#define OFTEN_NS 1000000ull	/* between two questions whether the context lives */
#define SELDOM_NS 1000000000ull
#define LONG_NS 20000000ull	/* from then on a wait sleeps between its looks */
#define REST_US 50

/* Pinned, and its device address is the host's: CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING. */
static MPSD_READ_OFTEN uint32_t (*words)[MPSD_LANES + 1];	/* and a gate */

/* The first one is the mover's own. */
struct mpsd_lane mpsd_lanes[MPSD_LANES] = { { .stream = CU_STREAM_LEGACY, .is_used = true } };
MPSD_READ_OFTEN unsigned int mpsd_lanes_used = 1;
static uint64_t words_of;	/* the moves before the copy that they are marked in */

CUresult make_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags);
CUresult make_cuMemFreeHost(void *p);

CUresult mpsd_lanes_ready(void)
{
	size_t size = GENERATIONS * sizeof(*words);
	void *pages = NULL;
	CUresult result;

	if (__atomic_load_n(&words, __ATOMIC_ACQUIRE))
		return CUDA_SUCCESS;
	result = make_cuMemHostAlloc(&pages, size, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
	/* What a move overtakes, or is about to, is tried again. */
	if (result == MPSD_AGAIN || mpsd_is_loss(result))
		return result;
	if (result != CUDA_SUCCESS) {
		if (!mpsd_is_left())
			mpsd_exact_fail("out of pinned host memory");
		return MPSD_AGAIN;
	}
	mpsd_word_take(&mpsd_exact_lock);
	if (!words) {
		for (size_t i = 0; i < size / sizeof(uint32_t); i++)
			__atomic_store_n((uint32_t *)pages + i, 0, __ATOMIC_RELAXED);
		__atomic_store_n(&words, pages, __ATOMIC_RELEASE);
		pages = NULL;
	}
	mpsd_word_give(&mpsd_exact_lock);
	if (pages)
		make_cuMemFreeHost(pages);
	else
		mpsd_pins_forget(words);
	return CUDA_SUCCESS;
}

static uint32_t *word_in(uint64_t moves, const struct mpsd_lane *lane)
{
	return &words[moves / 2 % GENERATIONS][lane - mpsd_lanes];
}

uint32_t *mpsd_lane_word(const struct mpsd_lane *lane)
{
	return word_in(mpsd_tables()->moves, lane);
}

uint32_t *mpsd_lanes_gate(void)
{
	return words ? &words[mpsd_tables()->moves / 2 % GENERATIONS][MPSD_LANES] : NULL;
}

static CUstream key(CUstream stream)
{
	return stream ? stream : CU_STREAM_LEGACY;
}

/* Mostly it is the same again. */
MPSD_OF_A_LAUNCH struct mpsd_lane *mpsd_lane_find(CUstream stream)
{
	static MPSD_READ_OFTEN struct mpsd_lane *last = &mpsd_lanes[1];

	if (__builtin_expect(last->is_used & (last->stream == key(stream)), 1))
		return last;
	for (unsigned int i = 1; i < mpsd_lanes_used; i++)
		if (mpsd_lanes[i].is_used && mpsd_lanes[i].stream == key(stream))
			return last = &mpsd_lanes[i];
	return NULL;
}

/* A lane that nobody uses any more goes on counting where it was: nothing of it is open. */
struct mpsd_lane *mpsd_lane_of(CUstream stream)
{
	struct mpsd_lane *lane = mpsd_lane_find(stream);

	if (lane)
		return lane;
	for (unsigned int i = 1; !lane && i < mpsd_lanes_used; i++)
		if (!mpsd_lanes[i].is_used && mpsd_lane_look(&mpsd_lanes[i]) == mpsd_lanes[i].given)
			lane = &mpsd_lanes[i];
	if (!lane && mpsd_lanes_used < MPSD_LANES)
		lane = &mpsd_lanes[mpsd_lanes_used++];
	if (lane) {
		lane->stream = key(stream);
		lane->is_used = true;
		lane->is_apart = mpsd_made_is_apart(stream);
		lane->after_saves = lane->after_replay = 0;
	}
	return lane;
}

/* The words have 32 bits of a number that has 64. */
static uint64_t look(struct mpsd_lane *lane, const uint32_t *word)
{
	uint32_t ahead = __atomic_load_n(word, __ATOMIC_ACQUIRE) - (uint32_t)lane->proven;
	uint64_t said = lane->proven + ahead;

	/*
	 * Nothing that was not asked for: host memory is not trusted beyond that, and a word that is behind what the order
	 * of streams has proven looks like one that is far ahead.
	 */
	if (said > lane->marked)
		return lane->proven;
	if (lane->stop && said >= lane->stop)
		said = lane->stop - 1;
	if (said > lane->proven)
		lane->proven = said;
	return lane->proven;
}

uint64_t mpsd_lane_look(struct mpsd_lane *lane)
{
	return words ? look(lane, word_in(words_of, lane)) : lane->proven;
}

void mpsd_lane_conclude(struct mpsd_lane *lane, uint64_t number)
{
	if (lane->stop && number >= lane->stop)
		number = lane->stop - 1;
	if (number > lane->proven)
		lane->proven = number;
}

bool mpsd_lane_is_ordered(const struct mpsd_lane *lane)
{
	unsigned int ordered = 0;

	for (unsigned int i = 1; i < mpsd_lanes_used; i++)
		ordered += mpsd_lanes[i].is_used && !mpsd_lanes[i].is_apart;
	return !lane->is_apart && ordered > 1;
}

bool mpsd_lanes_all_proven(void)
{
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		if (mpsd_lane_look(&mpsd_lanes[i]) != mpsd_lanes[i].given)
			return false;
	return true;
}

bool mpsd_lanes_all_marked(void)
{
	for (unsigned int i = 0; i < mpsd_lanes_used; i++)
		if (mpsd_lanes[i].marked != mpsd_lanes[i].given)
			return false;
	return true;
}

bool mpsd_lanes_others_are_open(const struct mpsd_lane *lane)
{
	for (unsigned int i = 1; i < mpsd_lanes_used; i++) {
		struct mpsd_lane *other = &mpsd_lanes[i];

		if (other->is_used && other != lane && other->given > mpsd_lane_look(other) && !mpsd_undo_is_saver(other))
			return true;
	}
	return false;
}

/* Of a context that may be lost the driver is asked seldom: the daemon knows sooner, and it may keep who asks. */
static uint64_t question_ns(void)
{
	return mpsd_line_ready() ? SELDOM_NS : OFTEN_NS;
}

/* What a stream of that name answers is of no interest but for what is wrong with the context. */
static bool is_wrong(CUresult result)
{
	switch ((int)result) {
	case CUDA_SUCCESS: case CUDA_ERROR_NOT_READY: case CUDA_ERROR_NOT_FOUND: case CUDA_ERROR_INVALID_CONTEXT:
	case CUDA_ERROR_INVALID_HANDLE:
		return false;
	default:
		return (int)result < CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED ||
		       (int)result > CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
	}
}

static CUresult wait_for(struct mpsd_lane *lane, uint64_t number, bool has_followers)
{
	uint64_t moves = mpsd_tables()->moves, began = mpsd_now_ns(), asked = 0, proven, marked;
	CUstream stream;

	for (unsigned int looks = 1;; looks++) {
		mpsd_word_take(&mpsd_exact_lock);
		proven = mpsd_is_left() ? 0 : mpsd_lane_look(lane);
		marked = lane->marked;
		stream = lane->stream;
		mpsd_word_give(&mpsd_exact_lock);
		if (atomic_load(&mpsd_moves) != moves)
			return MPSD_AGAIN;
		if (proven >= number || number > marked) {
			if (looks > 1) {
				uint64_t waited_ns = mpsd_now_ns() - began;

				mpsd_pace_waited(waited_ns);
				mpsd_spending_waited(waited_ns);
			}
			return CUDA_SUCCESS;
		}
		if (looks >= LOOKS) {
			uint64_t now = mpsd_now_ns();
			CUresult result = CUDA_SUCCESS;

			asked = asked ? asked : now;
			if (now - asked > question_ns()) {
				result = mpsd_poll_ask(stream);
				asked = mpsd_now_ns();
			}
			if (is_wrong(result))
				return result;
			/* What is waited for may itself wait for what others would do next. */
			if (has_followers && (mpsd_hosts_keep() || now - began > mpsd_wish()->patience_ns))
				return CUDA_ERROR_NOT_READY;
			if (now - began > LONG_NS)
				usleep(REST_US);
			else
				sched_yield();
		}
	}
}

CUresult mpsd_lane_wait(struct mpsd_lane *lane, uint64_t number)
{
	return wait_for(lane, number, false);
}

CUresult mpsd_lane_come(struct mpsd_lane *lane, uint64_t number)
{
	return wait_for(lane, number, true);
}

CUresult mpsd_lane_seen(struct mpsd_lane *lane, uint64_t number)
{
	uint64_t now = mpsd_now_ns();
	bool is, may_ask;

	mpsd_word_take(&mpsd_exact_lock);
	is = mpsd_is_left() || mpsd_lane_look(lane) >= number || number > lane->marked;
	may_ask = !is && now - lane->asked_ns > question_ns();
	if (may_ask)
		lane->asked_ns = now;
	mpsd_word_give(&mpsd_exact_lock);
	return is || may_ask ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult mpsd_lanes_wait(void)
{
	CUresult result = CUDA_SUCCESS;
	unsigned int count = MPSD_LANES;

	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++) {
		uint64_t given;

		mpsd_word_take(&mpsd_exact_lock);
		given = mpsd_lanes[i].given;
		count = mpsd_lanes_used;
		mpsd_word_give(&mpsd_exact_lock);
		result = mpsd_lane_come(&mpsd_lanes[i], given);
	}
	return result;
}

/* What comes behind it may end where it was left all the same, and proves nothing of it. */
void mpsd_lane_stop(struct mpsd_lane *lane, uint64_t number, uint64_t moves)
{
	if (words_of == moves && (!lane->stop || number < lane->stop))
		lane->stop = number;
}

void mpsd_lanes_move(void)
{
	uint64_t moves = mpsd_tables()->moves;

	for (unsigned int i = 0; words && i < mpsd_lanes_used; i++) {
		struct mpsd_lane *lane = &mpsd_lanes[i];

		lane->marked = mpsd_lane_look(lane);
		lane->stop = 0;
		__atomic_store_n(word_in(moves, lane), (uint32_t)lane->proven, __ATOMIC_RELEASE);
	}
	words_of = moves;
}

void mpsd_lanes_give_up(bool all)
{
	for (unsigned int i = all ? 0 : 1; words && i < mpsd_lanes_used; i++) {
		struct mpsd_lane *lane = &mpsd_lanes[i];

		lane->proven = lane->marked = lane->given;
		lane->stop = 0;
		__atomic_store_n(word_in(words_of, lane), (uint32_t)lane->given, __ATOMIC_RELEASE);
	}
}

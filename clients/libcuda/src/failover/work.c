// SPDX-License-Identifier: MIT
/*
 * Whether work may have been in flight when a context was lost. Each piece of work is counted before it is
 * given to the driver, and again when that has it; a wait for all, or for the one stream that all of it went
 * into, proves that what was counted before the wait has ended, if nothing was on its way to the driver then. A
 * fail-over that keeps memory alone tells the program once, in the first wait after it, where work may be missing
 * or half done.
 */
#include "exact/shelf.h"
#include "exact/state.h"
#include "failover/carry.h"
#include "failover/graph.h"
#include "failover/line.h"
#include "failover/plain.h"
#include "window.h"

MPSD_WRITTEN_OFTEN struct mpsd_work_counts mpsd_work_counts;
static MPSD_WRITTEN_OFTEN atomic_uint_least64_t ended;
static atomic_uint_least64_t held;	/* of those begun and not given: they wait for the end of a move */
static atomic_bool lost, is_lost_for_good, several_contexts;

/* What a wait that begins now may prove; 0: nothing. */
uint64_t mpsd_work_count(void)
{
	uint64_t there = atomic_load(&mpsd_work_counts.given);

	return atomic_load(&mpsd_work_counts.begun) == there ? there : 0;
}

static MPSD_SELDOM void more(uint64_t stream)
{
	uint64_t none = 0;

	/* One handle for as many streams as there are threads. */
	if (stream == mpsd_work_key(CU_STREAM_PER_THREAD))
		mpsd_line_opaque("CU_STREAM_PER_THREAD");
	if (!atomic_compare_exchange_strong(&mpsd_work_counts.only, &none, stream) && none != stream)
		atomic_store(&mpsd_work_counts.only, MPSD_SEVERAL_STREAMS);
}

#define LINE 64

/* By the linker: where what is MPSD_READ_OFTEN, and MPSD_WRITTEN_OFTEN, begins. */
#define BY_LINKER __attribute__((visibility("hidden")))
extern const char __start_mpsd_read_often[] BY_LINKER, __start_mpsd_written_often[] BY_LINKER;

/*
 * At once: between the locks of a launch each line of the processor's cache would be waited for by itself. So many lines
 * these have, as good as; where they have more, some of these are waited for.
 */
static inline void fetch_what_a_launch_looks_at(void)
{
	const char *read = __start_mpsd_read_often, *written = __start_mpsd_written_often;

	__builtin_prefetch(read);
	__builtin_prefetch(read + 1 * LINE);
	__builtin_prefetch(read + 2 * LINE);
	__builtin_prefetch(read + 3 * LINE);
	__builtin_prefetch(read + 4 * LINE);
	__builtin_prefetch(written, 1);
	__builtin_prefetch(written + 1 * LINE, 1);
	__builtin_prefetch(written + 2 * LINE, 1);
	__builtin_prefetch(written + 3 * LINE, 1);
	__builtin_prefetch(written + 4 * LINE, 1);
	__builtin_prefetch(mpsd_order_now(), 1);
	__builtin_prefetch(&mpsd_lanes[1], 1);
	mpsd_shelf_fetch();
}

MPSD_OF_A_LAUNCH void mpsd_work(CUstream stream)
{
	if (mpsd_exact())
		fetch_what_a_launch_looks_at();
	/* It is done when the graph is launched. */
	if (__builtin_expect(mpsd_capturing(), 0) && mpsd_is_in_capture_outside(stream))
		return;
	if (__builtin_expect(atomic_load_explicit(&mpsd_work_counts.only, memory_order_relaxed) != mpsd_work_key(stream), 0))
		more(mpsd_work_key(stream));
	mpsd_thread.works = true;
	atomic_fetch_add(&mpsd_work_counts.begun, 1);
}

MPSD_OF_A_LAUNCH void mpsd_work_given(void)
{
	if (__builtin_expect(mpsd_thread.works, 1))
		atomic_fetch_add(&mpsd_work_counts.given, 1);
	mpsd_thread.works = false;
	mpsd_exact_given();
}

/* A launch that went by the short way: whether it is over, and has failed. Where it is to be given again, that is begun. */
MPSD_SELDOM bool mpsd_work_has_failed(CUresult result)
{
	mpsd_thread.works = true;
	if (mpsd_carry_again(result, 0))
		return false;
	mpsd_work_given();
	return true;
}

/* It writes nothing, and what it waits for is counted where that is: the stream has no work by it. */
void mpsd_work_that_waits(CUstream stream)
{
	if (mpsd_capturing() && mpsd_is_in_capture_outside(stream))
		return;
	if (mpsd_work_key(stream) == mpsd_work_key(CU_STREAM_PER_THREAD))
		more(mpsd_work_key(stream));
	mpsd_thread.works = true;
	atomic_fetch_add(&mpsd_work_counts.begun, 1);
}

void mpsd_work_captured(void)
{
	if (mpsd_thread.works)
		atomic_fetch_sub(&mpsd_work_counts.begun, 1);
	mpsd_thread.works = false;
}

void mpsd_work_given_late(void)
{
	atomic_fetch_add(&mpsd_work_counts.given, 1);
}

void mpsd_work_held(bool is)
{
	if (mpsd_thread.works)
		atomic_fetch_add(&held, is ? 1 : -1ull);
}

/*
 * Who begins now finds the move, and is held; who had begun before is counted. In this order: what comes between is
 * counted too often, never not at all.
 */
bool mpsd_work_rests(void)
{
	uint64_t waits = atomic_load(&held), there = atomic_load(&mpsd_work_counts.given);

	return atomic_load(&mpsd_work_counts.begun) == there + waits;
}

void mpsd_work_several(void)
{
	atomic_store(&several_contexts, true);
}

bool mpsd_work_is_several(void)
{
	return atomic_load(&several_contexts);
}

static void proven(uint64_t work)
{
	uint64_t before = atomic_load(&ended);

	while (before < work && !atomic_compare_exchange_weak(&ended, &before, work))
		;
}

void mpsd_waited_for_all(CUresult result, uint64_t moves, uint64_t work)
{
	if (result == CUDA_SUCCESS && moves == atomic_load(&mpsd_moves) && !atomic_load(&several_contexts))
		proven(work);
}

void mpsd_waited(CUresult result, uint64_t moves, CUstream stream, uint64_t work)
{
	if (atomic_load(&mpsd_work_counts.only) == mpsd_work_key(stream))
		mpsd_waited_for_all(result, moves, work);
}

/* What is on its way to the driver is held, and comes to the next copy. */
void mpsd_work_ended(void)
{
	proven(atomic_load(&mpsd_work_counts.given));
}

bool mpsd_work_lost(void)
{
	bool is = atomic_load(&mpsd_work_counts.begun) != atomic_load(&ended);

	if (is)
		atomic_store(&lost, true);
	return is;
}

bool mpsd_work_is_over(void)
{
	uint64_t there = atomic_load(&ended);

	return atomic_load(&mpsd_work_counts.begun) == there && atomic_load(&mpsd_work_counts.given) == there;
}

void mpsd_work_missing(void)
{
	atomic_store(&lost, true);
}

void mpsd_work_lose(void)
{
	atomic_store(&is_lost_for_good, true);
}

CUresult mpsd_work_told(CUresult result)
{
	if (result != CUDA_SUCCESS)
		return result;
	if (!atomic_load_explicit(&is_lost_for_good, memory_order_relaxed) &&
	    (!atomic_load_explicit(&lost, memory_order_relaxed) || !atomic_exchange(&lost, false)))
		return result;
	return CUDA_ERROR_LAUNCH_FAILED;
}

// SPDX-License-Identifier: MIT
/* Snapshot buffers, and the thread that releases them, with an imitated driver. Prints "ok". */
#include "exact/chunks.h"

#include "capture.h"
#include "checking.h"
#include "clock.h"
#include "debug.h"
#include "exact/leave.h"
#include "exact/limit.h"
#include "exact/order.h"
#include "exact/spending.h"
#include "exact/undo.h"
#include "exact/validate.h"
#include "failover/line.h"
#include "failover/made.h"
#include "failover/undoroom.h"
#include "memory.h"
#include "stats.h"
#include "thread.h"

#define CHUNK ((uint64_t)64 << 20)
#define MOST_CHUNKS 1024

/* Stubs of the tested modules' dependencies. */

static const struct mpsd_tables tables;
static struct mpsd_stats stats;
_Atomic(const struct mpsd_tables *) mpsd_tables_now = &tables;
const struct mpsd_tables *mpsd_first_tables = &tables;
_Thread_local struct mpsd_thread mpsd_thread;
struct mpsd_stats *mpsd_stats = &stats;
struct mpsd_epoch mpsd_epoch;
struct mpsd_word mpsd_exact_lock;
__typeof__(mpsd_orders) mpsd_orders;
atomic_bool mpsd_exact_on = true, mpsd_relay_on;
atomic_uint mpsd_captures, mpsd_inside[MPSD_COPIES_KNOWN];
atomic_uint_least64_t mpsd_moves;

#define NEVER(type, name, ...) type name(__VA_ARGS__) { CHECK(!#name); __builtin_unreachable(); }

NEVER(bool, mpsd_capture_active, void)
NEVER(void, mpsd_carry_plainly, void)
NEVER(uint64_t, mpsd_carry_wait, void)
NEVER(CUresult, mpsd_enter_context, void)
NEVER(CUresult, mpsd_epoch_settle, void)
NEVER(bool, mpsd_exact_lock_soon, void)
NEVER(bool, mpsd_order_wait, uint64_t moves)
NEVER(bool, mpsd_relay_shut, uint64_t moves)
NEVER(void, mpsd_undo_each_open, void (*each)(const struct mpsd_saved *copy, void *what), void *what)
NEVER(bool, mpsd_validates, void)
NEVER(void, mpsd_word_wait, struct mpsd_word *word)
NEVER(void, mpsd_word_wake, struct mpsd_word *word)
NEVER(CUresult, cuThreadExchangeStreamCaptureMode, CUstreamCaptureMode *mode)

void mpsd_line_unsure(const char *what) { CHECK(what); }
void mpsd_line_wake(void) { }
void mpsd_limit_want(uint64_t bytes) { CHECK(bytes); }
CUresult mpsd_limit_await(void) { return CUDA_SUCCESS; }
void mpsd_exposure_begin(const char *why) { CHECK(why); }
void mpsd_spending_excuse(uint64_t ns) { }
void mpsd_spending_of_device(void) { }
bool mpsd_lanes_all_proven(void) { return true; }
bool mpsd_undoroom_is_open(void) { return true; }
CUresult mpsd_undoroom_await(void) { return CUDA_SUCCESS; }
static uint64_t now = 1;
uint64_t mpsd_now_ns(void) { return now; }
const char *mpsd_debug_text(enum mpsd_debug field) { return NULL; }
uint64_t mpsd_debug_number(enum mpsd_debug field, uint64_t otherwise, uint64_t unit, uint64_t least, uint64_t most)
{
	return otherwise;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	*bytes = (size_t)1 << 40;
	return CUDA_SUCCESS;
}

static uint64_t limit = MPSD_NO_LIMIT;
static int pauses, threads;

uint64_t mpsd_limit(void) { return limit; }
void mpsd_pause(int milliseconds) { pauses += milliseconds; }

static bool has_thread = true;

/* It never comes to run. */
bool mpsd_thread_start(void *(*run)(void *), void *argument)
{
	threads++;
	return has_thread;
}

CUresult mpsd_memory_alloc_inside(CUdeviceptr *dptr, size_t size, enum mpsd_inside inside)
{
	static CUdeviceptr next = CHUNK;

	*dptr = next;
	next += size;
	return CUDA_SUCCESS;
}

static void (*while_it_frees)(void);	/* a move overtakes that; NULL: it is freed */

CUresult cuMemFree_v2(CUdeviceptr base)
{
	if (!while_it_frees)
		return CUDA_SUCCESS;
	while_it_frees();
	return MPSD_AGAIN;
}

static void do_nothing(void)
{
}

static void add_one(void)
{
	CHECK(mpsd_chunk_more(CHUNK) == CUDA_SUCCESS);
}

/* The tests */

static void keep_a_chunk_that_a_move_left(void)
{
	uint64_t got;

	add_one();
	while_it_frees = do_nothing;
	CHECK(mpsd_undo_release(0) == MPSD_AGAIN);
	CHECK(mpsd_undo_has() && mpsd_undo_bytes() == CHUNK);
	CHECK(mpsd_chunk_take(1, &got));
	mpsd_chunks_empty();
	while_it_frees = NULL;
	CHECK(mpsd_undo_release(0) == CUDA_SUCCESS);
	CHECK(!mpsd_undo_has() && !mpsd_undo_bytes());
}

/* The old context may still write to it, too. */
static void drop_a_chunk_if_all_were_lost_meanwhile(void)
{
	uint64_t got;

	add_one();
	while_it_frees = mpsd_exact_lose_room;
	CHECK(mpsd_undo_release(0) == MPSD_AGAIN);
	CHECK(!mpsd_chunk_take(1, &got) && !mpsd_undo_has() && !mpsd_undo_bytes());
	while_it_frees = NULL;
	/* Later ones are not lost. */
	add_one();
	while_it_frees = do_nothing;
	CHECK(mpsd_undo_release(0) == MPSD_AGAIN && mpsd_undo_has());
	while_it_frees = NULL;
	CHECK(mpsd_undo_release(0) == CUDA_SUCCESS && !mpsd_undo_bytes());
}

static void count_no_chunk_without_a_place(void)
{
	uint64_t got;

	for (unsigned int i = 0; i < MOST_CHUNKS - 1; i++) {
		add_one();
		CHECK(mpsd_chunk_take(CHUNK, &got) && got == CHUNK);
	}
	add_one();
	while_it_frees = add_one;
	CHECK(mpsd_undo_release(0) == MPSD_AGAIN);
	CHECK(mpsd_undo_bytes() == MOST_CHUNKS * CHUNK);
	while_it_frees = NULL;
}

static void end_a_window(void)
{
	now += 30000000000;
	mpsd_chunks_tend();
}

static void use(unsigned int chunks)
{
	uint64_t got;

	for (unsigned int i = 0; i < chunks; i++)
		while (!mpsd_chunk_take(CHUNK, &got))
			CHECK(mpsd_chunk_more(CHUNK) == CUDA_SUCCESS);
	mpsd_chunks_empty();
	mpsd_epoch.number++;
}

/* A warm-up needs ten of them, later epochs one. */
static void release_what_no_epoch_needs_any_more(void)
{
	has_thread = false;
	mpsd_chunks_tend();
	use(10);
	end_a_window();
	use(1);
	end_a_window();
	CHECK(!threads && mpsd_chunks_needed() == UINT64_MAX);
	use(1);
	end_a_window();
	CHECK(threads == 1 && mpsd_chunks_needed() == CHUNK);
	CHECK(mpsd_undo_release(mpsd_chunks_needed()) == CUDA_SUCCESS && mpsd_undo_bytes() == CHUNK);
	/* Then a large one comes after all. */
	use(10);
	CHECK(mpsd_chunks_needed() == UINT64_MAX);
	/* A program that rests keeps its buffers. */
	for (int i = 0; i < 5; i++)
		end_a_window();
	CHECK(mpsd_chunks_needed() == UINT64_MAX && mpsd_undo_bytes() == 10 * CHUNK);
	/* Little is kept. */
	CHECK(mpsd_undo_release(4 * CHUNK) == CUDA_SUCCESS);
	for (int i = 0; i < 3; i++) {
		use(1);
		end_a_window();
	}
	CHECK(mpsd_chunks_needed() == UINT64_MAX && mpsd_chunks_due_ms() == 30001);
	/* The thread that tends them does not spin after the mode has ended. */
	mpsd_exact_on = false;
	end_a_window();
	CHECK(mpsd_chunks_due_ms() == 30001);
	mpsd_exact_on = true;
	CHECK(mpsd_undo_release(0) == CUDA_SUCCESS && mpsd_chunks_due_ms() == -1);
	threads = 0;
	has_thread = true;
}

/* After a fork the thread is not there. */
static void wait_for_no_thread_in_a_child(void)
{
	limit = 0;
	mpsd_release_begin();
	CHECK(threads == 1);
	mpsd_release_child();
	mpsd_release_at_end();
	mpsd_release_begin();
	CHECK(threads == 1 && !pauses);
}

int main(void)
{
	keep_a_chunk_that_a_move_left();
	drop_a_chunk_if_all_were_lost_meanwhile();
	CHECK(mpsd_undo_release(0) == CUDA_SUCCESS);
	release_what_no_epoch_needs_any_more();
	count_no_chunk_without_a_place();
	wait_for_no_thread_in_a_child();
	puts("ok");
	return 0;
}

// SPDX-License-Identifier: MIT
/*
 * fence.c and the thread that unmaps, with an imitated cut, operation records and CPUs. Prints "ok".
 */
#include "failover/fence.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "checking.h"
#include "exact/exact.h"
#include "failover/carry.h"
#include "failover/cut.h"
#include "failover/move.h"
#include "failover/undoroom.h"
#include "failover/unmapping.h"
#include "failover/vmm.h"
#include "failoverwire.h"
#include "windows.h"

#define PATIENCE_MS 20000

enum who { MOVER, OTHER };

/* Stubs of the tested modules' dependencies. */

static void *real[1];
static const struct mpsd_tables tables = { real, real, 0 };
_Atomic(const struct mpsd_tables *) mpsd_tables_now = &tables;
_Thread_local struct mpsd_thread mpsd_thread;
atomic_uint_least64_t mpsd_moves;
atomic_uint mpsd_inside[MPSD_COPIES_KNOWN];
struct window mpsd_windows[DEVICES];

/* An open window has two segments: the program's memory and the snapshot buffer. */
#define PIECE ((uint64_t)2 << 20)

bool arena_next_piece(const struct arena *arena, uint64_t from, struct arena_range *piece)
{
	*piece = (struct arena_range){ from, PIECE };
	return from < arena->base + 2 * PIECE;
}

static CUresult unmap(CUdeviceptr address, size_t size)
{
	CHECK(mpsd_windows[0].open && address && size == PIECE);
	return CUDA_SUCCESS;
}

CUmemGenericAllocationHandle *mpsd_vmm_take(size_t *count)
{
	*count = 0;
	return NULL;
}

unsigned int mpsd_exact_room_last(struct arena_range *pieces, unsigned int count)
{
	(void)pieces;
	return count / 2;
}

unsigned int mpsd_in_use_number(void)
{
	return 0;
}

void mpsd_work_lose(void)
{
	CHECK(!"it holds");
}

void mpsd_exact_lose_room(void)
{
	CHECK(!"it holds");
}

bool mpsd_exact_is_over(void)
{
	return false;
}

static bool goes_ahead;
static int busy;	/* how often another thread holds the lock of the records */

bool mpsd_exact_go_ahead(bool *may_be_told)
{
	*may_be_told = goes_ahead;
	return goes_ahead;
}

bool mpsd_exact_close(void)
{
	return busy-- <= 0;
}

static atomic_bool is_cut;
static atomic_bool is_refused;	/* no UVM, and the driver does not finish before the fence holds */
static atomic_bool holds;

struct mpsd_cut *mpsd_cut_begin(unsigned int number, const struct arena_range *pieces, unsigned int count,
				unsigned int first)
{
	(void)number, (void)pieces, (void)count, (void)first;
	atomic_store(&is_cut, false);
	return (struct mpsd_cut *)&is_cut;
}

enum mpsd_cut_state mpsd_cut_look(struct mpsd_cut *cut)
{
	(void)cut;
	if (atomic_load(&is_refused))
		return MPSD_CUT_FAILED;
	return atomic_load(&is_cut) ? MPSD_CUT_DONE : MPSD_CUT_GOES_ON;
}

static int until_enough;	/* so many checks; 0: never */

bool mpsd_cut_is_enough(const struct mpsd_cut *cut)
{
	(void)cut;
	return until_enough && !--until_enough;
}

bool mpsd_cut_is_gone(const struct mpsd_cut *cut, unsigned int piece)
{
	(void)cut, (void)piece;
	return false;
}

void mpsd_cut_end(struct mpsd_cut *cut)
{
	(void)cut;
	while (atomic_load(&is_refused) && !atomic_load(&holds))
		usleep(1000);
}

void mpsd_cut_discard(struct mpsd_cut *cut)
{
	(void)cut;
}

/* Which threads spin. */

static int processors;
static pthread_t mover;
static atomic_bool has_rested[2], spins_at_it[2];

int __wrap_sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set)
{
	CHECK(!pid);
	memset(set, 0, size);
	for (int i = 0; i < processors; i++)
		CPU_SET(i, set);
	return 0;
}

void __real_mpsd_fence_rest(uint64_t began, bool spins);

static bool is_told;

/* The old instance is cut off once each waiting thread has waited, unless the threads wait for the command. */
void __wrap_mpsd_fence_rest(uint64_t began, bool spins)
{
	enum who who = pthread_equal(pthread_self(), mover) ? MOVER : OTHER;

	atomic_store(&spins_at_it[who], spins);
	atomic_store(&has_rested[who], true);
	if (!is_told && atomic_load(&has_rested[MOVER]) && (atomic_load(&has_rested[OTHER]) || !goes_ahead))
		atomic_store(&is_cut, true);
	__real_mpsd_fence_rest(began, spins);
}

static void move(bool ahead)
{
	goes_ahead = ahead;
	for (int i = 0; i < 2; i++) {
		atomic_store(&has_rested[i], false);
		atomic_store(&spins_at_it[i], false);
	}
	atomic_store(&holds, false);
	CHECK(mpsd_fence(ahead));
	CHECK(mpsd_fence_is_ahead() == ahead);
	CHECK(mpsd_fence_complete());
	CHECK(!mpsd_fence_is_ahead());
	atomic_store(&holds, true);
	atomic_store(&is_cut, true);
	mpsd_fence_finish();
	mpsd_unmapping_await(PATIENCE_MS);
	CHECK(!mpsd_unmapping_lasts());
}

/* A thread that is waited for has at least one CPU. */
static void who_spins(void)
{
	mpsd_fence_listen(-1, 1);
	for (processors = 1; processors <= 4; processors++) {
		move(false);
		CHECK(spins_at_it[MOVER] == (processors > 1) && !has_rested[OTHER]);
		move(true);
		CHECK(spins_at_it[OTHER] == (processors > 1));
		CHECK(spins_at_it[MOVER] == (processors > 2));
	}
}

/* The command is on the daemon connection. */
static void say(int line[2])
{
	const struct mpsd_failover_message word = { .magic = MPSD_FAILOVER_MAGIC,
						    .version = MPSD_FAILOVER_VERSION,
						    .kind = MPSD_FAILOVER_FENCED,
						    .generation = 1 };

	CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, line));
	CHECK(write(line[1], &word, sizeof(word)) == (ssize_t)sizeof(word));
	is_told = true;
	mpsd_fence_listen(line[0], 1);
}

static void say_no_more(const int line[2])
{
	is_told = false;
	close(line[0]);
	close(line[1]);
}

/* No other wait ends. */
static void told(bool ahead, bool refused)
{
	struct mpsd_failover_message word;
	int line[2];

	say(line);
	busy = 1;
	atomic_store(&is_refused, refused);
	move(ahead);
	CHECK(recv(line[0], &word, sizeof(word), MSG_DONTWAIT) < 0);
	atomic_store(&is_refused, false);
	say_no_more(line);
}

/* The program continues while its snapshot buffer is still being cut off: the command frees the buffer. */
static void told_before_it_goes_on(void)
{
	int line[2];

	say(line);
	real[0] = (void *)unmap;
	mpsd_windows[0] = (struct window){ .open = true, .arena = { .base = PIECE, .pieces = 2 } };
	goes_ahead = false;
	busy = 1;
	until_enough = 2;
	CHECK(mpsd_fence(false));
	CHECK(mpsd_fence_is_unfinished() && mpsd_undoroom_is_open());
	mpsd_fence_finish();
	CHECK(!mpsd_fence_is_unfinished());
	atomic_store(&is_cut, true);
	mpsd_unmapping_await(PATIENCE_MS);
	CHECK(!mpsd_unmapping_lasts());
	mpsd_windows[0].open = false;
	say_no_more(line);
}

/* The command is received once: a lock held by another thread does not discard it. */
static void a_word_is_kept(void)
{
	told(true, false);
	told(false, false);
	told(false, true);
	told_before_it_goes_on();
}

int main(void)
{
	mover = pthread_self();
	who_spins();
	a_word_is_kept();
	puts("ok");
	return 0;
}

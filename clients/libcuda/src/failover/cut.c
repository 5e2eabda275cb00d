// SPDX-License-Identifier: MIT
/*
 * The driver's cuMemUnmap() lets UVM take a piece out of the GPU's page tables, and both of them then wait for the resource
 * manager, piece after piece. After a fault that is busy, under one lock, for 0.1 to 0.6 s: with the fault, and with all
 * that the libraries of the lost domain ask it. What matters here is done before that wait: UVM_FREE has waited for the
 * invalidation of all translations when it takes the range out of its books. So each piece is freed by a thread that may
 * be kept afterwards, and that it is gone is seen by another external range, which can lie there only then. One is put in
 * the place of the others too, when nobody waits for it, so that the driver's library finds something when it unmaps a
 * piece later.
 */
#include "failover/cut.h"

#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "debug.h"
#include "elfview.h"
#include "failover/copy.h"
#include "failover/descriptors.h"
#include "proxy.h"
#include "thread.h"
#include "uvm.h"

#define SOON_NS 30000		/* a piece that takes longer than that may be gone, and its thread kept */
#define AT_FIRST 8		/* threads, no more than half as many as there are processors, unless it is said */
#define AT_ONCE_NS 200000	/* a thread that has a processor so soon takes it from nobody */
#define MOST_THREADS 256

struct cutter {
	struct mpsd_cut *cut;
	uint64_t started_ns;
};

struct piece {
	struct arena_range range;
	atomic_uint_least64_t begun_ns;		/* 0: not yet */
	atomic_bool is_gone, is_filled;
};

struct mpsd_cut {
	int fd;
	CUresult (*free)(CUdeviceptr base, size_t size);	/* the stand-in's, which has no UVM */
	CUresult (*external)(CUdeviceptr base, size_t size);
	atomic_uint next, gone, returned;	/* pieces */
	atomic_uint first_gone;
	atomic_uint threads;
	atomic_bool has_failed, others_failed, is_over;	/* the first ones; those behind them */
	unsigned int started, count, first;
	struct cutter cutters[MOST_THREADS];
	struct piece pieces[];
};

static atomic_int spaces[MPSD_COPY_NUMBERS];	/* 1 + the descriptor */

/* What a driver that has no UVM has in place of it. */
static struct {
	CUresult (*free)(CUdeviceptr base, size_t size);
	CUresult (*external)(CUdeviceptr base, size_t size);
} imitated[MPSD_COPY_NUMBERS];

void mpsd_cut_know(unsigned int number, void *library)
{
	imitated[number].free = (__typeof__(imitated[number].free))mpsd_elfview_symbol(library, "standinCutRange");
	imitated[number].external = (__typeof__(imitated[number].external))mpsd_elfview_symbol(library, "standinExternalRange");
}

void mpsd_cut_space(unsigned int number, int fd)
{
	atomic_store_explicit(&spaces[number], fd + 1, memory_order_relaxed);
}

static bool take_away(struct mpsd_cut *cut, const struct arena_range *range)
{
	return cut->free ? cut->free(range->base, range->size) == CUDA_SUCCESS
			 : mpsd_uvm_free(cut->fd, range->base, range->size);
}

static bool put_in_place(struct mpsd_cut *cut, const struct arena_range *range)
{
	return cut->external ? cut->external(range->base, range->size) == CUDA_SUCCESS
			     : mpsd_uvm_external(cut->fd, range->base, range->size);
}

/* By one thread at a time. */
static bool fill(struct mpsd_cut *cut, struct piece *piece)
{
	bool is = put_in_place(cut, &piece->range);

	if (is)
		atomic_store(&piece->is_filled, true);
	return is;
}

static void note_gone(struct mpsd_cut *cut, struct piece *piece)
{
	if (atomic_exchange(&piece->is_gone, true))
		return;
	if (piece < cut->pieces + cut->first)
		atomic_fetch_add(&cut->first_gone, 1);
	atomic_fetch_add(&cut->gone, 1);
}

/*
 * Who is kept spins for some milliseconds at the resource manager's lock, and a hundred of them take all processors from
 * the mover, from those of other programs and from the daemon. Where there is none to spare a thread stays as it is: it
 * would have to wait for one with the driver's locks in its hands.
 */
static void give_way(const struct cutter *cutter)
{
	struct sched_param none = { 0 };

	if (mpsd_now_ns() - cutter->started_ns < AT_ONCE_NS)
		sched_setscheduler(0, SCHED_IDLE, &none);
}

static void *run(void *argument)
{
	const struct cutter *cutter = argument;
	struct mpsd_cut *cut = cutter->cut;
	unsigned int at;

	give_way(cutter);
	while (!atomic_load(&cut->is_over) && (at = atomic_fetch_add(&cut->next, 1)) < cut->count) {
		struct piece *piece = &cut->pieces[at];

		atomic_store(&piece->begun_ns, mpsd_now_ns());
		if (!take_away(cut, &piece->range)) {
			atomic_store(piece < cut->pieces + cut->first ? &cut->has_failed : &cut->others_failed, true);
			break;
		}
		note_gone(cut, piece);
		atomic_fetch_add(&cut->returned, 1);
	}
	atomic_fetch_sub(&cut->threads, 1);
	return NULL;
}

static bool start_one(struct mpsd_cut *cut)
{
	struct cutter *cutter;

	if (cut->started == MOST_THREADS)
		return false;
	cutter = &cut->cutters[cut->started++];
	*cutter = (struct cutter){ cut, mpsd_now_ns() };
	atomic_fetch_add(&cut->threads, 1);
	if (mpsd_thread_start(run, cutter))
		return true;
	atomic_fetch_sub(&cut->threads, 1);
	return false;
}

/* What one of them waits for in the resource manager keeps no other one from what UVM does. */
static unsigned int threads_at_first(void)
{
	cpu_set_t may;
	int half = sched_getaffinity(0, sizeof(may), &may) ? 0 : CPU_COUNT(&may) / 2;
	unsigned int usual = half < 1 ? 1 : half > AT_FIRST ? AT_FIRST : (unsigned int)half;

	return (unsigned int)mpsd_debug_number(MPSD_DEBUG_CUTTERS, usual, 1, 1, MOST_THREADS);
}

/* The copy's own descriptor, once more: -1: it has none, or it is not known which. */
static int space_of(unsigned int number)
{
	int fd = atomic_load(&spaces[number]) - 1;

	return fd >= 0 && mpsd_descriptors_is(number, fd) ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
}

void mpsd_cut_discard(struct mpsd_cut *cut)
{
	if (cut && cut->fd >= 0)
		close(cut->fd);
	free(cut);
}

struct mpsd_cut *mpsd_cut_begin(unsigned int number, const struct arena_range *pieces, unsigned int count,
				unsigned int first)
{
	struct mpsd_cut *cut = calloc(1, sizeof(*cut) + count * sizeof(cut->pieces[0]));

	if (!cut)
		return NULL;
	cut->free = imitated[number].free;
	cut->external = imitated[number].external;
	cut->fd = cut->free ? -1 : space_of(number);
	cut->count = count;
	cut->first = first;
	for (unsigned int i = 0; i < count; i++)
		cut->pieces[i].range = pieces[i];
	if ((!cut->free && cut->fd < 0) || !start_one(cut)) {
		mpsd_cut_discard(cut);
		return NULL;
	}
	for (unsigned int i = threads_at_first(); i > 1 && cut->started < count; i--)
		start_one(cut);
	return cut;
}

/*
 * How many pieces are begun. Those that take long may be gone: UVM goes from one to the next, and whoever asks keeps it
 * from that meanwhile. So the oldest is asked for, and then another one only if that is gone.
 */
static unsigned int look_at_pieces(struct mpsd_cut *cut)
{
	unsigned int begun = atomic_load(&cut->next);
	uint64_t now = mpsd_now_ns();
	bool is_gone = true;

	if (begun > cut->count)
		begun = cut->count;
	for (unsigned int i = 0; i < begun && is_gone; i++) {
		struct piece *piece = &cut->pieces[i];
		uint64_t since = atomic_load(&piece->begun_ns);

		if (!since || now <= since + SOON_NS || atomic_load(&piece->is_gone))
			continue;
		is_gone = fill(cut, piece);
		if (is_gone)
			note_gone(cut, piece);
	}
	return begun;
}

enum mpsd_cut_state mpsd_cut_look(struct mpsd_cut *cut)
{
	/* In this order: more come back meanwhile. */
	unsigned int returned = atomic_load(&cut->returned), begun = look_at_pieces(cut), gone = atomic_load(&cut->gone);
	unsigned int kept = begun > returned ? begun - returned : 0;

	if (gone == cut->count)
		return MPSD_CUT_DONE;
	if (atomic_load(&cut->has_failed) || (atomic_load(&cut->others_failed) && mpsd_cut_is_enough(cut)))
		return MPSD_CUT_FAILED;
	/* Whoever is at a piece is kept: as many more begin the next ones. */
	if (gone < begun)
		return MPSD_CUT_GOES_ON;
	for (unsigned int i = 0; i < kept && begun + i < cut->count; i++)
		if (!start_one(cut))
			break;
	return MPSD_CUT_GOES_ON;
}

bool mpsd_cut_is_enough(const struct mpsd_cut *cut)
{
	return atomic_load(&cut->first_gone) == cut->first;
}

bool mpsd_cut_is_gone(const struct mpsd_cut *cut, unsigned int piece)
{
	return atomic_load(&cut->pieces[piece].is_gone);
}

void mpsd_cut_end(struct mpsd_cut *cut)
{
	atomic_store(&cut->is_over, true);
	while (atomic_load(&cut->threads))
		mpsd_pause(1);
	for (unsigned int i = 0; i < cut->count; i++)
		if (atomic_load(&cut->pieces[i].is_gone) && !atomic_load(&cut->pieces[i].is_filled))
			fill(cut, &cut->pieces[i]);
}

// SPDX-License-Identifier: MIT
/*
 * The ledger's rows. All that is written goes into shared memory of a fixed size, and what is needed to
 * find a row again lies beside it in memory of this process: no allocation, no system call but the clock,
 * which is none either.
 */
#include "notes.h"

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "launches.h"
#include "proxy.h"

#define BUCKETS 65536u

static struct mpsd_ledger fallback;
MPSD_READ_OFTEN struct mpsd_ledger *mpsd_ledger = &fallback;
static int shared_fd = -1;

/*
 * Rows of notes: those of the living hang in chains by a hash of the address, all others wait in one
 * queue, the freed ones at its end. One link is enough, and 0 ends a chain: links and heads are 1 + a row.
 */
static struct {
	uint32_t link[MPSD_LEDGER_NOTES], chains[BUCKETS];
	uint32_t first, last;
	uint64_t order;
} notes;

static int zones_free_from;	/* no zone row below is free */

static uint64_t now_ns(clockid_t clock)
{
	struct timespec time;

	clock_gettime(clock, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Starting */

/* A child is no client: what it writes is for nobody, and least of all into its parent's ledger. */
static void in_child(void)
{
	int fd = shared_fd;

	shared_fd = -1;
	if (fd >= 0)
		close(fd);
	if (mpsd_ledger != &fallback &&
	    mmap(mpsd_ledger, sizeof(*mpsd_ledger), PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
		mpsd_ledger = &fallback;
}

static struct mpsd_ledger *share(void)
{
	int fd = memfd_create("mpsd-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	void *at = MAP_FAILED;

	if (fd < 0)
		return NULL;
	if (!ftruncate(fd, sizeof(struct mpsd_ledger)) &&
	    !fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
		at = mmap(NULL, sizeof(struct mpsd_ledger), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED) {
		close(fd);
		return NULL;
	}
	shared_fd = fd;
	return at;
}

static void start(void)
{
	struct mpsd_ledger *shared = share();

	if (shared)
		mpsd_launches_move(shared);
	for (uint32_t row = 0; row + 1 < MPSD_LEDGER_NOTES; row++)
		notes.link[row] = row + 2;
	notes.first = 1;
	notes.last = MPSD_LEDGER_NOTES;
	mpsd_ledger->version = MPSD_LEDGER_VERSION;
	mpsd_ledger->size = sizeof(*mpsd_ledger);
	mpsd_ledger->pid = (uint32_t)getpid();
	__atomic_store_n(&mpsd_ledger->magic, MPSD_LEDGER_MAGIC, __ATOMIC_RELEASE);
	pthread_atfork(NULL, NULL, in_child);
}

void mpsd_ledger_start(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, start);
}

int mpsd_ledger_fd(void)
{
	return shared_fd;
}

/* Allocations */

static uint32_t *chain_of(uint64_t address)
{
	return &notes.chains[(address >> 9) * 0x9e3779b97f4a7c15ull >> 48];
}

_Static_assert(BUCKETS == 1u << 16, "the hash above has 16 bits");

void mpsd_ledger_born(uint64_t address, uint64_t size, uint32_t device)
{
	uint32_t taken = notes.first, *chain = chain_of(address);
	struct mpsd_note_row *row;

	notes.order++;
	if (!taken) {
		mpsd_ledger->notes_lost++;
		return;
	}
	notes.first = notes.link[taken - 1];
	if (!notes.first)
		notes.last = 0;
	notes.link[taken - 1] = *chain;
	*chain = taken;
	row = &mpsd_ledger->notes[taken - 1];
	mpsd_row_begin(&row->sequence);
	row->device = device;
	row->address = address;
	row->size = size;
	row->order = notes.order;
	row->born_ns = now_ns(CLOCK_MONOTONIC);
	row->freed_ns = 0;
	mpsd_row_end(&row->sequence);
}

/* One that had no row is one less that is lost. */
void mpsd_ledger_freed(uint64_t address)
{
	uint32_t *link = chain_of(address), taken;
	struct mpsd_note_row *row;

	while (*link && mpsd_ledger->notes[*link - 1].address != address)
		link = &notes.link[*link - 1];
	taken = *link;
	if (!taken) {
		mpsd_ledger->notes_lost--;
		return;
	}
	*link = notes.link[taken - 1];
	notes.link[taken - 1] = 0;
	if (notes.last)
		notes.link[notes.last - 1] = taken;
	else
		notes.first = taken;
	notes.last = taken;
	row = &mpsd_ledger->notes[taken - 1];
	mpsd_row_begin(&row->sequence);
	row->freed_ns = now_ns(CLOCK_MONOTONIC);
	mpsd_row_end(&row->sequence);
}

/* Zones */

int mpsd_ledger_zone(uint64_t start, uint64_t size, enum mpsd_zone_kind kind, enum mpsd_zone_role role)
{
	while (zones_free_from < MPSD_LEDGER_ZONES && mpsd_ledger->zones[zones_free_from].kind)
		zones_free_from++;
	if (zones_free_from == MPSD_LEDGER_ZONES)
		return -1;
	struct mpsd_zone_row *row = &mpsd_ledger->zones[zones_free_from];

	mpsd_row_begin(&row->sequence);
	row->kind = (uint16_t)kind;
	row->role = (uint16_t)role;
	row->start = start;
	row->end = start + size;
	row->born_ns = now_ns(CLOCK_MONOTONIC_RAW);
	mpsd_row_end(&row->sequence);
	return zones_free_from++;
}

void mpsd_ledger_zone_gone(int number)
{
	struct mpsd_zone_row *row = &mpsd_ledger->zones[number];

	mpsd_row_begin(&row->sequence);
	row->kind = MPSD_ZONE_NONE;
	mpsd_row_end(&row->sequence);
	if (number < zones_free_from)
		zones_free_from = number;
}

uint64_t mpsd_ledger_zone_born(int number)
{
	return mpsd_ledger->zones[number].born_ns;
}

void mpsd_ledger_zone_since(int number, uint64_t born_ns)
{
	struct mpsd_zone_row *row = &mpsd_ledger->zones[number];

	mpsd_row_begin(&row->sequence);
	row->born_ns = born_ns;
	mpsd_row_end(&row->sequence);
}

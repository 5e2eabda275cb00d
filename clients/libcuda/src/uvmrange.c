// SPDX-License-Identifier: MIT
/*
 * Over UVM, a managed range is an mmap of the process's own descriptor of /dev/nvidia-uvm, shared and
 * with the address as its offset. Of the two descriptors that libcuda has open, only the one that is the
 * address space accepts it. It is libcuda's: it is looked for again when it does not work any more.
 *
 * What the CPU does there must stay a crash, so the mapping allows it nothing; the GPU's accesses are
 * absorbed all the same (measured at the null page).
 */
#include "uvmrange.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "elfview.h"
#include "proxy.h"
#include "uvm.h"

/* What a program on the CPU may do in a zone. */
#define CPU_ACCESS PROT_NONE

#define DEVICE_NAME "nvidia-uvm"
#define PROBE ((size_t)64 << 10)
#define MOST_SEARCHES 16	/* that found none: there is none */

#define MOST_DESCRIPTORS 16

struct descriptors {
	int count, fds[MOST_DESCRIPTORS];
};

static int descriptor = -1;
static struct stat found_as;
static struct descriptors before, standbys, older;	/* the last two are of other copies: not to be used */
static bool is_gone;

/* The stand-in driver's own functions in place of UVM, which it has none of. */
static struct {
	bool tried;
	CUresult (*managed)(CUdeviceptr base, size_t size);
	CUresult (*sparse)(CUdeviceptr base, size_t size);
	CUresult (*release)(CUdeviceptr base, size_t size);
} standin;

static bool is_standin(void)
{
	if (!standin.tried) {
		standin.managed = (__typeof__(standin.managed))mpsd_elfview_symbol(mpsd_real_handle, "standinManagedRange");
		standin.sparse = (__typeof__(standin.sparse))mpsd_elfview_symbol(mpsd_real_handle, "standinSparseRange");
		standin.release = (__typeof__(standin.release))mpsd_elfview_symbol(mpsd_real_handle, "standinFreeRange");
		standin.tried = true;
	}
	return standin.managed && standin.sparse && standin.release;
}

/* The descriptor */

static void *mmap_uvm(int fd, uint64_t base, size_t size, int how)
{
	return mmap((void *)base, size, PROT_READ | PROT_WRITE, MAP_SHARED | how, fd, (off_t)base);
}

/* As libcuda has a reservation: nothing but a place. Without REPLACE not over what another thread put there. */
static bool put_placeholder(uint64_t base, size_t size, bool replace)
{
	int how = replace ? MAP_FIXED : MAP_FIXED_NOREPLACE;
	void *at = mmap((void *)base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | how, -1, 0);

	return at == (void *)base;
}

/* On scratch addresses: where it fails, the kernel may have taken away what was there. */
static bool is_address_space(int fd)
{
	void *scratch = mmap(NULL, PROBE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	bool is;

	if (scratch == MAP_FAILED)
		return false;
	is = mmap_uvm(fd, (uint64_t)scratch, PROBE, MAP_FIXED) == scratch;
	if (is)
		munmap(scratch, PROBE);
	else if (put_placeholder((uint64_t)scratch, PROBE, false))
		munmap(scratch, PROBE);
	return is;
}

static bool is_uvm(DIR *directory, const char *name)
{
	char link[256];
	ssize_t length = readlinkat(dirfd(directory), name, link, sizeof(link) - 1);
	struct stat status;
	const char *last;

	if (length <= 0)
		return false;
	link[length] = 0;
	last = strrchr(link, '/');
	return last && !strcmp(last + 1, DEVICE_NAME) && !fstat(atoi(name), &status) && S_ISCHR(status.st_mode);
}

static struct descriptors all_descriptors(void)
{
	DIR *directory = opendir("/proc/self/fd");
	struct descriptors all = { .count = 0 };
	struct dirent *entry;

	while (directory && all.count < MOST_DESCRIPTORS && (entry = readdir(directory)))
		if (is_uvm(directory, entry->d_name))
			all.fds[all.count++] = atoi(entry->d_name);
	if (directory)
		closedir(directory);
	return all;
}

static bool is_among(int fd, const struct descriptors *those)
{
	for (int i = 0; i < those->count; i++)
		if (those->fds[i] == fd)
			return true;
	return false;
}

static struct descriptors without(struct descriptors all, const struct descriptors *those)
{
	struct descriptors left = { .count = 0 };

	for (int i = 0; i < all.count; i++)
		if (!is_among(all.fds[i], those))
			left.fds[left.count++] = all.fds[i];
	return left;
}

void mpsd_range_copy(enum mpsd_range_copy what)
{
	switch (what) {
	case MPSD_RANGE_COPY_COMES:
		before = all_descriptors();
		break;
	case MPSD_RANGE_COPY_IS_THERE:
		standbys = without(all_descriptors(), &before);
		break;
	case MPSD_RANGE_COPY_WENT:
		standbys.count = 0;
		break;
	case MPSD_RANGE_COPY_TAKES_OVER:
		older = before;
		standbys.count = 0;
		descriptor = -1;
		standin.tried = false;
		break;
	}
}

void mpsd_range_gone(bool gone)
{
	is_gone = gone;
}

/* That of the copy in use; -1: there is none. It is looked for anew. */
static int find_descriptor(void)
{
	static int searches;
	struct descriptors all = { .count = 0 };
	int found = -1;

	if (searches < MOST_SEARCHES)
		all = all_descriptors();
	for (int i = 0; i < all.count && found < 0; i++)
		if (!is_among(all.fds[i], &standbys) && !is_among(all.fds[i], &older) && is_address_space(all.fds[i]))
			found = all.fds[i];
	searches = found < 0 ? searches + 1 : 0;
	return found;
}

/* Managed ranges */

/* No child of a fork has it: what it does with its copy of the addresses is no business of the parent's. */
static bool hide(uint64_t base, size_t size)
{
	return !madvise((void *)base, size, MADV_DONTFORK) && !mprotect((void *)base, size, CPU_ACCESS);
}

/* The number may be another file's by now: the driver closes what it likes. */
static bool have_descriptor(void)
{
	struct stat now;

	if (descriptor >= 0 && !fstat(descriptor, &now) && now.st_dev == found_as.st_dev &&
	    now.st_ino == found_as.st_ino && now.st_rdev == found_as.st_rdev)
		return true;
	descriptor = find_descriptor();
	return descriptor >= 0 && !fstat(descriptor, &found_as);
}

static bool try_manage(uint64_t base, size_t size)
{
	if (!have_descriptor())
		return false;
	if (mmap_uvm(descriptor, base, size, MAP_FIXED) != (void *)base) {
		put_placeholder(base, size, false);
		return false;
	}
	/*
	 * Pages of a zone that is hit come from the host: on a GPU that has none left the access would be fatal for
	 * everybody. Where that is refused, as at address 0, they come from the GPU.
	 */
	if (hide(base, size)) {
		mpsd_uvm_prefer_host(descriptor, base, size);
		return true;
	}
	put_placeholder(base, size, true);
	return false;
}

/* A second time, for the descriptor may be another by now. */
bool mpsd_range_manage(uint64_t base, size_t size)
{
	if (is_standin())
		return standin.managed(base, size) == CUDA_SUCCESS;
	if (try_manage(base, size))
		return true;
	descriptor = -1;
	return try_manage(base, size);
}

bool mpsd_range_manage_null(void)
{
	void *at;

	if (is_standin())
		return standin.managed(0, MPSD_RANGE_NULL_PAGE) == CUDA_SUCCESS;
	if (!have_descriptor())
		return false;
	/* Nothing that the program has there is replaced. */
	at = mmap_uvm(descriptor, 0, MPSD_RANGE_NULL_PAGE, MAP_FIXED_NOREPLACE);
	if (at == MAP_FAILED)
		return false;
	/* A kernel that does not know the flag takes the address for a hint. */
	if (at == NULL && hide(0, MPSD_RANGE_NULL_PAGE))
		return true;
	munmap(at, MPSD_RANGE_NULL_PAGE);
	return false;
}

/* Sparse ranges */

bool mpsd_range_sparse(uint64_t base, size_t size, const uint8_t gpu[16])
{
	if (is_standin())
		return standin.sparse(base, size) == CUDA_SUCCESS;
	if (!have_descriptor() || !mpsd_uvm_external(descriptor, base, size))
		return false;
	if (mpsd_uvm_map_sparse(descriptor, base, size, gpu))
		return true;
	mpsd_uvm_free(descriptor, base, size);
	return false;
}

bool mpsd_range_free(uint64_t base, size_t size, bool managed)
{
	if (is_standin()) {
		/* What it does not find has gone with the context. */
		standin.release(base, size);
		return true;
	}
	if (!managed)
		return is_gone || (have_descriptor() && mpsd_uvm_free(descriptor, base, size));
	return base ? put_placeholder(base, size, true) : !munmap(NULL, size);
}

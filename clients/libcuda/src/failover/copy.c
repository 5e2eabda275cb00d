// SPDX-License-Identifier: MIT
/*
 * A second copy of libcuda wants three things of its own: an abstract socket, which the first one holds under a
 * name that is made of the process's id, another CUDA_MPS_PIPE_DIRECTORY, and the addresses of the windows,
 * where the process has a placeholder already. Its own slots for bind(), getenv(), mmap(), munmap() and fopen()
 * lead here, those for open() and the like to opened.c, those for ioctl(), close() and mmap() to autopsy.c,
 * descriptors.c and place.c, in the first one too; the program's environment and its other libraries stay as they are.
 */
#include "failover/copy.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "elfview.h"
#include "failover/autopsy.h"
#include "failover/cut.h"
#include "failover/descriptors.h"
#include "failover/maps.h"
#include "failover/opened.h"
#include "failover/owned.h"
#include "failover/remains.h"
#include "place.h"
#include "window.h"
#include "windows.h"

#define COPIES (MPSD_COPY_NUMBERS - 1)
#define SOCKET_NAME "cuda-uvmfd-"
#define PIPE "CUDA_MPS_PIPE_DIRECTORY"
#define CONNECTIONS "CUDA_DEVICE_MAX_CONNECTIONS"
#define COPY_CONNECTIONS "CUDA_DEVICE_MAX_COPY_CONNECTIONS"

static _Thread_local const char *pipe_directory;
static _Thread_local uint64_t copy_number;

void mpsd_copy_pipe(const char *directory, uint64_t number)
{
	pipe_directory = directory;
	copy_number = number;
}

static int own_bind(int fd, const struct sockaddr *address, socklen_t length)
{
	const struct sockaddr_un *given = (const struct sockaddr_un *)address;
	struct sockaddr_un own = { .sun_family = AF_UNIX };
	int size;

	if (length <= sizeof(sa_family_t) + 1 || address->sa_family != AF_UNIX || given->sun_path[0] ||
	    strncmp(given->sun_path + 1, SOCKET_NAME, strlen(SOCKET_NAME)) != 0)
		return bind(fd, address, length);
	size = snprintf(own.sun_path + 1, sizeof(own.sun_path) - 1, "mpsd-%llu-%.*s",
			(unsigned long long)copy_number, (int)(length - sizeof(sa_family_t) - 1),
			given->sun_path + 1);
	return bind(fd, (struct sockaddr *)&own, (socklen_t)(sizeof(sa_family_t) + 1 + (size_t)size));
}

/*
 * After an exception of a kernel the GPU stands still for as long as its channels are looked through, half a
 * millisecond each (faultinject/evidence/mechanisms-failover.md). A context has 15 under MPS, 12 of them for copies in four
 * connections: one that waits in a standby has one, where the program's environment does not say how many.
 */
static char *instead(const char *name)
{
	if (!pipe_directory)
		return NULL;
	if (!strcmp(name, PIPE))
		return (char *)pipe_directory;
	return !strcmp(name, COPY_CONNECTIONS) && !getenv(CONNECTIONS) && !getenv(COPY_CONNECTIONS) ? "1" : NULL;
}

static char *own_getenv(const char *name)
{
	char *told = instead(name);

	return told ? told : getenv(name);
}

static char *own_secure_getenv(const char *name)
{
	char *told = instead(name);

	return told ? told : secure_getenv(name);
}

static _Thread_local struct {
	void *base;
	size_t size;		/* 0: the thread reserves nothing */
} place;

void mpsd_copy_place(uint64_t base, size_t size)
{
	place.base = (void *)base;
	place.size = size;
}

/*
 * What lies there is the process's own, a window's placeholder and its zones: the copy is told that it has it. Not
 * more than that: what is behind it in the first copy's reservation is used by that.
 */
static void *own_mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
	if (place.size && address == place.base && length == place.size && fd < 0)
		return place.base;
	return mpsd_place_mmap(address, length, protection, flags, fd, offset);
}

/* Nor does it take away what it never mapped: when it gives its reservation back, or ends. */
static int own_munmap(void *address, size_t length)
{
	if (mpsd_window_covers((uint64_t)address, length))
		return 0;
	return munmap(address, length);
}

static FILE *own_fopen(const char *path, const char *how)
{
	int fd;

	if (!mpsd_maps_is(path))
		return fopen(path, how);
	fd = mpsd_maps_open();
	return fd < 0 ? NULL : fdopen(fd, "r");
}

static void *replacement(const char *symbol, unsigned int number)
{
	if (!strcmp(symbol, "ioctl"))
		return mpsd_autopsy_ioctl(number);
	if (!strcmp(symbol, "close"))
		return mpsd_descriptors_close(number);
	if (!strcmp(symbol, "mmap") || !strcmp(symbol, "mmap64"))
		return number ? (void *)own_mmap : (void *)mpsd_place_mmap;
	if (!number)
		return NULL;
	if (!strcmp(symbol, "fopen") || !strcmp(symbol, "fopen64"))
		return (void *)own_fopen;
	if (!strcmp(symbol, "munmap"))
		return (void *)own_munmap;
	if (!strcmp(symbol, "bind"))
		return (void *)own_bind;
	if (!strcmp(symbol, "getenv"))
		return (void *)own_getenv;
	if (!strcmp(symbol, "secure_getenv"))
		return (void *)own_secure_getenv;
	return mpsd_opened_call(symbol, number);
}

struct relro {
	ElfW(Addr) base, begin, end;
};

/* What the loader has made read-only after it had relocated it. */
static int find_relro(struct dl_phdr_info *object, size_t size, void *context)
{
	struct relro *relro = context;

	(void)size;
	if (object->dlpi_addr != relro->base)
		return 0;
	for (int i = 0; i < object->dlpi_phnum; i++) {
		if (object->dlpi_phdr[i].p_type != PT_GNU_RELRO)
			continue;
		relro->begin = relro->base + object->dlpi_phdr[i].p_vaddr;
		relro->end = relro->begin + object->dlpi_phdr[i].p_memsz;
		/* Of its last page, where that is not whole, the loader leaves all as it is. */
		relro->end &= ~((ElfW(Addr))sysconf(_SC_PAGESIZE) - 1);
	}
	return 1;
}

static bool write_slot(ElfW(Addr) base, void **slot, void *value)
{
	struct relro relro = { .base = base };
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *begin = (void *)((uintptr_t)slot & ~(uintptr_t)(page - 1));

	if (mprotect(begin, page, PROT_READ | PROT_WRITE))
		return false;
	/* Other threads may be on their way through it. */
	__atomic_store_n(slot, value, __ATOMIC_RELEASE);
	dl_iterate_phdr(find_relro, &relro);
	return (uintptr_t)slot < relro.begin || (uintptr_t)slot >= relro.end || !mprotect(begin, page, PROT_READ);
}

static bool write_table(const struct elfview *view, const ElfW(Rela) *table, size_t bytes, unsigned int number)
{
	for (size_t i = 0; i < bytes / sizeof(*table); i++) {
		uint32_t symbol = (uint32_t)ELF64_R_SYM(table[i].r_info);
		const char *name = view->strings + view->symbols[symbol].st_name;
		void *with = symbol ? replacement(name, number) : NULL;

		if (with && !view->symbols[symbol].st_shndx &&
		    !write_slot(view->base, (void **)(view->base + table[i].r_offset), with))
			return false;
	}
	return true;
}

static const void *absolute(const struct link_map *map, ElfW(Addr) value)
{
	return (const void *)(value < map->l_addr ? map->l_addr + value : value);
}

static bool write_slots(const struct link_map *map, unsigned int number)
{
	const ElfW(Rela) *rela = NULL, *plt = NULL;
	size_t rela_bytes = 0, plt_bytes = 0;
	struct elfview view;

	if (!mpsd_elfview_of_map(map, &view))
		return false;
	for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
		if (entry->d_tag == DT_RELA)
			rela = absolute(map, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_RELASZ)
			rela_bytes = entry->d_un.d_val;
		else if (entry->d_tag == DT_JMPREL)
			plt = absolute(map, entry->d_un.d_ptr);
		else if (entry->d_tag == DT_PLTRELSZ)
			plt_bytes = entry->d_un.d_val;
	}
	return write_table(&view, rela, rela ? rela_bytes : 0, number) &&
	       write_table(&view, plt, plt ? plt_bytes : 0, number);
}

struct search {
	struct stat file;
	bool found;
};

/* By inode, for the loader answers with what is loaded from the same one. */
static int is_loaded(struct dl_phdr_info *object, size_t size, void *context)
{
	struct search *search = context;
	struct stat file;

	(void)size;
	search->found = *object->dlpi_name && !stat(object->dlpi_name, &file) &&
			file.st_dev == search->file.st_dev && file.st_ino == search->file.st_ino;
	return search->found;
}

static bool is_free(const char *path)
{
	struct search search = { .found = false };

	if (stat(path, &search.file))
		return false;
	dl_iterate_phdr(is_loaded, &search);
	return !search.found;
}

void mpsd_copy_watch_first(void)
{
	static bool is_done;
	struct link_map *map = NULL;

	if (is_done)
		return;
	is_done = true;
	mpsd_cut_know(0, mpsd_real_handle);
	mpsd_autopsy_know(0, mpsd_real_handle);
	mpsd_remains_know(mpsd_real_handle);
	/* Where it cannot be, a move takes longer. */
	if (!dlinfo(mpsd_real_handle, RTLD_DI_LINKMAP, &map))
		write_slots(map, 0);
}

/* By number: the daemon's folder may be another one by now, with files that are not loaded. */
static atomic_bool is_taken[MPSD_COPY_NUMBERS];

static bool open_one(struct mpsd_copy *copy, const char **why)
{
	struct link_map *map = NULL;
	struct elfview view;

	mpsd_autopsy_left(copy->number, false);
	mpsd_owned_forget(copy->number);
	copy->handle = dlopen(copy->path, RTLD_NOW | RTLD_LOCAL);
	is_taken[copy->number] = copy->handle != NULL;
	copy->code = copy->handle && !dlinfo(copy->handle, RTLD_DI_LINKMAP, &map) ? map->l_ld : NULL;
	if (!copy->code || !write_slots(map, copy->number)) {
		*why = copy->handle ? "bind, getenv and mmap of the second driver instance cannot be redirected"
				    : "the second driver instance cannot be loaded";
		mpsd_copy_unload(copy);
		return false;
	}
	mpsd_cut_know(copy->number, copy->handle);
	mpsd_autopsy_know(copy->number, copy->handle);
	mpsd_elfview_of_map(map, &view);	/* write_slots() has read it too */
	for (unsigned int i = 0; i < MPSD_NAMES; i++)
		copy->calls[i] = mpsd_elfview_address(&view, mpsd_names[i]);
	for (unsigned int i = 0; i < MPSD_NAMES; i++) {
		if (!copy->calls[i] == !mpsd_real[i])
			continue;
		*why = "the second driver instance has another driver version";
		mpsd_copy_unload(copy);
		return false;
	}
	return true;
}

bool mpsd_copy_load(struct mpsd_copy *copy, const char *folder, const char **why)
{
	*copy = (struct mpsd_copy){ .handle = NULL };
	*why = "all driver instances are in use";
	for (int i = 0; i < COPIES; i++) {
		copy->number = (unsigned int)i + 1;
		if (is_taken[copy->number])
			continue;
		snprintf(copy->path, sizeof(copy->path), "%s/libcuda-%d.so.1", folder, i);
		if (is_free(copy->path))
			return open_one(copy, why);
		if (access(copy->path, R_OK))
			*why = "no driver file for a second instance";
	}
	return false;
}

atomic_uint mpsd_copy_ends[MPSD_COPY_NUMBERS];

void mpsd_copy_unload(struct mpsd_copy *copy)
{
	Dl_info info;

	if (copy->handle && !dlclose(copy->handle) && !dladdr(copy->code, &info)) {
		/* Before anything else: a thread that waits for one of those descriptors may come back at any time. */
		atomic_fetch_add(&mpsd_copy_ends[copy->number], 1);
		mpsd_descriptors_end(copy->number);
		is_taken[copy->number] = false;
	}
	copy->handle = NULL;
}

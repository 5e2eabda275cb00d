// SPDX-License-Identifier: MIT
/*
 * Several instances of the stand-in driver at work at once, for sanitizers: one memory at one address, mapped and
 * unmapped while another instance runs kernels, faults, ends and is unloaded. Arguments: the driver's file, a folder.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define MB ((size_t)1 << 20)
#define SPAN (64 * MB)
#define GRANULE (2 * MB)
#define ROUNDS 200
#define LIVES 6
#define IMAGE "standin module\nkernel add add 0\nkernel store store 0\nkernel late add 5000\n"

#define MUST(what) must((what), __LINE__)
#define CU(copy, name) ((__typeof__(&name))find((copy)->handle, name_of(name)))
#define name_of(name) name_text(name)
#define name_text(name) #name

struct copy {
	void *handle;
	CUcontext context;
	CUmodule module;
	CUfunction add, store, late;
};

/* Where the first instance finds space: ThreadSanitizer allows only some ranges. */
static CUdeviceptr window;

static void must(int code, int line)
{
	if (!code)
		return;
	printf("line %d: %d\n", line, code);
	exit(1);
}

static void *find(void *handle, const char *name)
{
	void *found = dlsym(handle, name);

	MUST(!found);
	return found;
}

/* With more socket names than one process could otherwise use. */
static int bind_with_a_number(int fd, const struct sockaddr *address, socklen_t length)
{
	static int number;
	char changed[128];

	memcpy(changed, address, length);
	changed[length] = (char)('a' + __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED));
	return bind(fd, (struct sockaddr *)changed, length + 1);
}

static void change_slot(void *handle)
{
	const ElfW(Rela) *rela = NULL;
	const ElfW(Sym) *symbols = NULL;
	const char *strings = NULL;
	struct link_map *map;
	size_t size = 0;

	MUST(dlinfo(handle, RTLD_DI_LINKMAP, &map));
	for (const ElfW(Dyn) *at = map->l_ld; at->d_tag != DT_NULL; at++) {
		rela = at->d_tag == DT_RELA ? (const void *)at->d_un.d_ptr : rela;
		size = at->d_tag == DT_RELASZ ? at->d_un.d_val : size;
		symbols = at->d_tag == DT_SYMTAB ? (const void *)at->d_un.d_ptr : symbols;
		strings = at->d_tag == DT_STRTAB ? (const void *)at->d_un.d_ptr : strings;
	}
	for (size_t i = 0; i < size / sizeof(*rela); i++) {
		void **slot = (void **)(map->l_addr + rela[i].r_offset);

		if (strcmp(strings + symbols[ELF64_R_SYM(rela[i].r_info)].st_name, "bind"))
			continue;
		MUST(mprotect((void *)((uintptr_t)slot & ~(uintptr_t)4095), 4096, PROT_READ | PROT_WRITE));
		*slot = (void *)bind_with_a_number;
		return;
	}
	MUST(1);
}

static void load(struct copy *copy, const char *path)
{
	copy->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!copy->handle)
		puts(dlerror());
	MUST(!copy->handle);
	change_slot(copy->handle);
	MUST(CU(copy, cuInit)(0));
}

static void begin(struct copy *copy)
{
	MUST(CU(copy, cuDevicePrimaryCtxRetain)(&copy->context, 0));
	MUST(CU(copy, cuCtxSetCurrent)(copy->context));
	MUST(CU(copy, cuModuleLoadData)(&copy->module, IMAGE));
	MUST(CU(copy, cuModuleGetFunction)(&copy->add, copy->module, "add"));
	MUST(CU(copy, cuModuleGetFunction)(&copy->store, copy->module, "store"));
	MUST(CU(copy, cuModuleGetFunction)(&copy->late, copy->module, "late"));
}

static int launch(struct copy *copy, CUfunction function, CUdeviceptr at, uint64_t words, CUstream stream)
{
	uint32_t one = 1;
	void *of_store[] = { &at, &one }, *of_add[] = { &at, &words, &one };

	return CU(copy, cuLaunchKernel)(function, 1, 1, 1, 1, 1, 1, 0, stream,
					function == copy->store ? of_store : of_add, NULL);
}

static CUmemGenericAllocationHandle create(struct copy *copy)
{
	CUmemAllocationProp prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
		.location.type = CU_MEM_LOCATION_TYPE_DEVICE,
	};
	CUmemGenericAllocationHandle handle;

	MUST(CU(copy, cuMemCreate)(&handle, GRANULE, &prop, 0));
	return handle;
}

/* Each instance imports what the first one exported: imported memory cannot be exported again. */
static CUmemGenericAllocationHandle adopt(int fd, struct copy *to)
{
	CUmemGenericAllocationHandle adopted;

	MUST(CU(to, cuMemImportFromShareableHandle)(&adopted, (void *)(intptr_t)fd,
						    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	return adopted;
}

static void map(struct copy *copy, CUdeviceptr at, CUmemGenericAllocationHandle handle)
{
	CUmemAccessDesc all = { .location.type = CU_MEM_LOCATION_TYPE_DEVICE, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };

	MUST(CU(copy, cuMemMap)(at, GRANULE, 0, handle, 0));
	MUST(CU(copy, cuMemSetAccess)(at, GRANULE, &all, 1));
}

static void reserve(struct copy *copy)
{
	CUdeviceptr at;

	MUST(CU(copy, cuMemAddressReserve)(&at, SPAN, 0, window, 0));
	MUST(window && at != window);
	window = at;
}

/* Only this instance writes the first word of the granule. */
static void *count(void *argument)
{
	struct copy *copy = argument;
	CUstream stream;

	MUST(CU(copy, cuCtxSetCurrent)(copy->context));
	MUST(CU(copy, cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < ROUNDS; i++) {
		MUST(launch(copy, copy->add, window, 1, stream));
		MUST(CU(copy, cuMemsetD8Async)(window + 4096, 1, 100, stream));
		if (i % 16 == 0)
			MUST(CU(copy, cuStreamSynchronize)(stream));
	}
	MUST(CU(copy, cuStreamSynchronize)(stream));
	return NULL;
}

/* Maps the next granule, works in it and unmaps it. */
static void *remap(void *argument)
{
	struct copy *copy = argument;

	MUST(CU(copy, cuCtxSetCurrent)(copy->context));
	for (int i = 0; i < ROUNDS / 4; i++) {
		CUmemGenericAllocationHandle handle = create(copy);

		map(copy, window + GRANULE, handle);
		MUST(launch(copy, copy->add, window + GRANULE, 100, NULL));
		MUST(CU(copy, cuCtxSynchronize)());
		MUST(CU(copy, cuMemUnmap)(window + GRANULE, GRANULE));
		MUST(CU(copy, cuMemRelease)(handle));
	}
	return NULL;
}

static uint32_t word(struct copy *copy)
{
	uint32_t found;

	MUST(CU(copy, cuCtxSetCurrent)(copy->context));
	MUST(CU(copy, cuMemcpyDtoH)(&found, window, sizeof(found)));
	return found;
}

/* A dies with work in flight while its memory is unmapped; B is not affected. */
static void die(struct copy *a, CUmemGenericAllocationHandle handle)
{
	CUstream stream;
	int code;

	MUST(CU(a, cuCtxSetCurrent)(a->context));
	MUST(CU(a, cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 20; i++)
		MUST(launch(a, a->late, window + 4096, 1000, stream));
	MUST(CU(a, cuMemUnmap)(window, GRANULE));
	MUST(CU(a, cuMemRelease)(handle));
	code = launch(a, a->store, window + GRANULE, 1, NULL);
	MUST(code && code != CUDA_ERROR_ILLEGAL_ADDRESS);
	MUST(CU(a, cuCtxSynchronize)() != CUDA_ERROR_ILLEGAL_ADDRESS);
	MUST(CU(a, cuDevicePrimaryCtxReset)(0));
}

int main(int count_of_arguments, char **arguments)
{
	struct copy copies[LIVES + 1] = { 0 }, *old = copies;
	CUmemGenericAllocationHandle handle;
	pthread_t threads[4];
	char path[512];
	int fd;

	MUST(count_of_arguments != 3);
	load(old, arguments[1]);
	begin(old);
	reserve(old);
	handle = create(old);
	map(old, window, handle);
	MUST(CU(old, cuMemExportToShareableHandle)(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	for (int life = 1; life <= LIVES; life++) {
		struct copy *fresh = &copies[life];
		CUmemGenericAllocationHandle adopted;

		snprintf(path, sizeof(path), "%s/copy-%d.so", arguments[2], life);
		load(fresh, path);
		/*
		 * A driver does not map a range that was occupied when it created its context, so free the window
		 * first.
		 */
		munmap((void *)window, SPAN);
		begin(fresh);
		reserve(fresh);
		adopted = adopt(fd, fresh);
		map(fresh, window, adopted);
		pthread_create(&threads[0], NULL, count, old);
		pthread_create(&threads[1], NULL, remap, old);
		pthread_create(&threads[2], NULL, remap, fresh);
		for (int i = 0; i < 3; i++)
			pthread_join(threads[i], NULL);
		pthread_create(&threads[0], NULL, remap, fresh);
		die(old, handle);
		pthread_join(threads[0], NULL);
		MUST(dlclose(old->handle));
		MUST(word(fresh) != (uint32_t)(life * ROUNDS));
		old = fresh;
		handle = adopted;
	}
	MUST(CU(old, cuDevicePrimaryCtxReset)(0));
	MUST(dlclose(old->handle));
	close(fd);
	puts("ok");
	return 0;
}

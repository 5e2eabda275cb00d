// SPDX-License-Identifier: MIT
/*
 * What is in memory, as a number for each page, which a kernel of this library's adds up; and small pieces of it, read
 * beside all that the program may have open. That is for validate.c and globals.c alone.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "exact/pages.h"

#define THREADS 256
#define PARTS 16	/* blocks for a page */
#define READ_BYTES ((size_t)1 << 20)

_Static_assert(MPSD_EXACT_PAGE == 2097152, "the kernel has the size of a page in its code");
_Static_assert(MPSD_EXACT_PAGE % (THREADS * PARTS * 16) == 0, "all threads have as much of a page to read");

/*
 * mpsd_page_sums(base, sums): for a page of each column of blocks, two words of 8 bytes at a time, mixed with where in
 * the page they are, for pages whose words have changed places are to differ; and mixed (as the generator splitmix64 does)
 * so that any change of bits changes a half of the sum's: two changes are not to make up for one another.
 */
const char mpsd_pages_code[] =
	".version 6.0\n"
	".target sm_70\n"
	".address_size 64\n"
	".visible .entry mpsd_page_sums(.param .u64 base, .param .u64 sums)\n"
	"{\n"
	"	.reg .pred %more;\n"
	"	.reg .b32 %page, %part, %parts, %thread, %threads;\n"
	"	.reg .b64 %at, %end, %step, %place, %one, %two, %high, %sum, %out;\n"
	"	ld.param.u64 %at, [base];\n"
	"	ld.param.u64 %out, [sums];\n"
	"	mov.u32 %page, %ctaid.x;\n"
	"	mov.u32 %part, %ctaid.y;\n"
	"	mov.u32 %parts, %nctaid.y;\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	mov.u32 %threads, %ntid.x;\n"
	"	mul.wide.u32 %high, %page, 2097152;\n"
	"	add.u64 %at, %at, %high;\n"
	"	add.u64 %end, %at, 2097152;\n"
	"	mad.lo.u32 %thread, %part, %threads, %thread;\n"
	"	mul.wide.u32 %place, %thread, 16;\n"
	"	add.u64 %at, %at, %place;\n"
	"	mul.lo.u32 %parts, %parts, %threads;\n"
	"	mul.wide.u32 %step, %parts, 16;\n"
	"	mul.wide.u32 %high, %page, 8;\n"
	"	add.u64 %out, %out, %high;\n"
	"	mov.u64 %sum, 0;\n"
	"again:\n"
	"	ld.volatile.global.v2.u64 {%one, %two}, [%at];\n"
	"	add.u64 %one, %one, %place;\n"
	"	mul.lo.u64 %one, %one, 0x9e3779b97f4a7c15;\n"
	"	shr.u64 %high, %one, 32;\n"
	"	xor.b64 %one, %one, %high;\n"
	"	add.u64 %two, %two, %one;\n"
	"	shr.u64 %high, %two, 30;\n"
	"	xor.b64 %two, %two, %high;\n"
	"	mul.lo.u64 %two, %two, 0xbf58476d1ce4e5b9;\n"
	"	shr.u64 %high, %two, 27;\n"
	"	xor.b64 %two, %two, %high;\n"
	"	mul.lo.u64 %two, %two, 0x94d049bb133111eb;\n"
	"	shr.u64 %high, %two, 31;\n"
	"	xor.b64 %two, %two, %high;\n"
	"	add.u64 %sum, %sum, %two;\n"
	"	add.u64 %place, %place, %step;\n"
	"	add.u64 %at, %at, %step;\n"
	"	setp.lt.u64 %more, %at, %end;\n"
	"	@%more bra again;\n"
	"	red.global.add.u64 [%out], %sum;\n"
	"	ret;\n"
	"}\n";

/* In one copy of the driver: what was made in another one has gone with it. */
static struct {
	bool is_there;
	uint64_t moves;
	CUstream stream;
	CUfunction function;
	CUdeviceptr sums;
	char *host;	/* pinned */
	size_t room;	/* of both, in bytes */
} own;

static CUresult begin(void)
{
	CUmodule module;
	CUresult result;

	if (own.is_there && own.moves == mpsd_tables()->moves)
		return CUDA_SUCCESS;
	memset(&own, 0, sizeof(own));
	own.moves = mpsd_tables()->moves;
	result = real_cuModuleLoadData(&module, mpsd_pages_code);
	if (result == CUDA_SUCCESS)
		result = real_cuModuleGetFunction(&own.function, module, "mpsd_page_sums");
	if (result == CUDA_SUCCESS)
		result = real_cuStreamCreate(&own.stream, CU_STREAM_NON_BLOCKING);
	own.is_there = result == CUDA_SUCCESS;
	return result;
}

static CUresult make_room(size_t bytes)
{
	CUresult result;

	if (bytes <= own.room)
		return CUDA_SUCCESS;
	if (own.room) {
		real_cuMemFree_v2(own.sums);
		real_cuMemFreeHost(own.host);
	}
	own.room = 0;
	result = real_cuMemAlloc_v2(&own.sums, bytes);
	if (result != CUDA_SUCCESS)
		return result;
	result = real_cuMemAllocHost_v2((void **)&own.host, bytes);
	if (result == CUDA_SUCCESS)
		own.room = bytes;
	else
		real_cuMemFree_v2(own.sums);
	return result;
}

CUresult mpsd_pages_ready(size_t pages)
{
	size_t bytes = pages * sizeof(uint64_t);
	CUresult result = begin();

	return result == CUDA_SUCCESS ? make_room(bytes > READ_BYTES ? bytes : READ_BYTES) : result;
}

/* Others may hold a lock for this: nobody waits in the driver. */
static CUresult come_to_its_end(void)
{
	CUresult result;

	while ((result = real_cuStreamQuery(own.stream)) == CUDA_ERROR_NOT_READY)
		sched_yield();
	return result;
}

CUresult mpsd_pages_add_up(CUfunction function, CUdeviceptr base, size_t count, CUdeviceptr sums, CUstream stream)
{
	void *parameters[] = { &base, &sums };

	return real_cuLaunchKernel(function, (unsigned int)count, PARTS, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
}

static CUresult sum_piece(const struct arena_range *piece, CUdeviceptr sums)
{
	return mpsd_pages_add_up(own.function, piece->base, piece->size / MPSD_EXACT_PAGE, sums, own.stream);
}

CUresult mpsd_pages_sum(const struct arena_range *pieces, size_t count, const uint64_t **sums)
{
	CUdeviceptr at = own.sums;
	CUresult result = real_cuMemsetD32Async(own.sums, 0, own.room / sizeof(uint32_t), own.stream);
	size_t pages = 0;

	*sums = (const uint64_t *)own.host;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
		result = sum_piece(&pieces[i], at + pages * sizeof(uint64_t));
		pages += pieces[i].size / MPSD_EXACT_PAGE;
	}
	if (result == CUDA_SUCCESS && pages)
		result = real_cuMemcpyDtoHAsync_v2(own.host, own.sums, pages * sizeof(uint64_t), own.stream);
	return result == CUDA_SUCCESS ? come_to_its_end() : result;
}

/* As much as there is room for is under way at once. */
CUresult mpsd_pages_read(char *to, const struct arena_range *from, size_t count)
{
	size_t offset = 0, under_way = 0;
	CUresult result = CUDA_SUCCESS;

	while (count && result == CUDA_SUCCESS) {
		size_t left = from->size - offset, room = own.room - under_way, part = left < room ? left : room;

		if (part)
			result = real_cuMemcpyDtoHAsync_v2(own.host + under_way, from->base + offset, part, own.stream);
		under_way += part;
		offset += part;
		if (offset == from->size) {
			from++;
			count--;
			offset = 0;
		}
		if (result == CUDA_SUCCESS && (under_way == own.room || !count)) {
			result = come_to_its_end();
			memcpy(to, own.host, under_way);
			to += under_way;
			under_way = 0;
		}
	}
	return result;
}

// SPDX-License-Identifier: MIT
/*
 * What an epoch wants saved at its beginning is a dozen allocations, mostly small. The driver takes some microseconds of
 * the program's thread for each copy, and no more for a kernel that copies them all, and says itself that it has.
 */
#include "exact/saver.h"

#include "failover/graph.h"

#define THREADS 256
#define PARTS 64			/* blocks for a range */
#define EACH 16				/* bytes that a thread copies at a time */
#define TIMES 4				/* so many at once */
#define MOST_BYTES ((uint64_t)32 << 20)	/* to save more of one range is left to the driver, which has copy engines */

_Static_assert(MPSD_EXACT_PAGE % (THREADS * PARTS * EACH * TIMES) == 0, "all threads have as much of a page to copy");

/* What the kernel is given. */
struct ranges {
	struct {
		CUdeviceptr to, from;
		uint64_t size;
	} each[MPSD_SAVED_AT_ONCE];
	CUdeviceptr word;	/* 0: nothing is written */
	uint32_t number, counter;
};

_Static_assert(sizeof(struct ranges) == 16 * 24 + 16 && MPSD_LANES == 256, "the kernel has that in its code");

/*
 * mpsd_save_ranges(ranges): each row of blocks copies one of them. The block that is the last to end writes the word; it finds
 * that by counting, up to so many, and there the counter begins anew.
 */
static const char code[] =
	".version 6.0\n"
	".target sm_70\n"
	".address_size 64\n"
	".global .align 4 .u32 counters[256];\n"
	".visible .entry mpsd_save_ranges(.param .align 8 .b8 ranges[400])\n"
	"{\n"
	"	.reg .pred %more, %not;\n"
	"	.reg .b32 %row, %part, %parts, %thread, %threads, %last;\n"
	"	.reg .b64 %list, %to, %from, %end, %at, %step, %a<8>;\n"
	"	mov.u32 %row, %ctaid.y;\n"
	"	mul.wide.u32 %at, %row, 24;\n"
	"	mov.u64 %list, ranges;\n"
	"	add.u64 %list, %list, %at;\n"
	"	ld.param.u64 %to, [%list];\n"
	"	ld.param.u64 %from, [%list+8];\n"
	"	ld.param.u64 %end, [%list+16];\n"
	"	add.u64 %end, %end, %from;\n"
	"	mov.u32 %part, %ctaid.x;\n"
	"	mov.u32 %parts, %nctaid.x;\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	mov.u32 %threads, %ntid.x;\n"
	"	mad.lo.u32 %thread, %part, %threads, %thread;\n"
	"	mul.wide.u32 %at, %thread, 16;\n"
	"	add.u64 %to, %to, %at;\n"
	"	add.u64 %from, %from, %at;\n"
	"	mul.lo.u32 %parts, %parts, %threads;\n"
	"	mul.wide.u32 %step, %parts, 16;\n"
	"again:\n"
	"	ld.global.v2.u64 {%a0, %a1}, [%from];\n"
	"	add.u64 %from, %from, %step;\n"
	"	ld.global.v2.u64 {%a2, %a3}, [%from];\n"
	"	add.u64 %from, %from, %step;\n"
	"	ld.global.v2.u64 {%a4, %a5}, [%from];\n"
	"	add.u64 %from, %from, %step;\n"
	"	ld.global.v2.u64 {%a6, %a7}, [%from];\n"
	"	add.u64 %from, %from, %step;\n"
	"	st.global.v2.u64 [%to], {%a0, %a1};\n"
	"	add.u64 %to, %to, %step;\n"
	"	st.global.v2.u64 [%to], {%a2, %a3};\n"
	"	add.u64 %to, %to, %step;\n"
	"	st.global.v2.u64 [%to], {%a4, %a5};\n"
	"	add.u64 %to, %to, %step;\n"
	"	st.global.v2.u64 [%to], {%a6, %a7};\n"
	"	add.u64 %to, %to, %step;\n"
	"	setp.lt.u64 %more, %from, %end;\n"
	"	@%more bra again;\n"
	"	ld.param.u64 %at, [ranges+384];\n"
	"	setp.eq.u64 %not, %at, 0;\n"
	"	@%not bra out;\n"
	"	bar.sync 0;\n"
	"	mov.u32 %thread, %tid.x;\n"
	"	setp.ne.u32 %not, %thread, 0;\n"
	"	@%not bra out;\n"
	"	membar.gl;\n"
	"	ld.param.u32 %part, [ranges+396];\n"
	"	mul.wide.u32 %step, %part, 4;\n"
	"	mov.u64 %list, counters;\n"
	"	add.u64 %list, %list, %step;\n"
	"	mov.u32 %parts, %nctaid.x;\n"
	"	mov.u32 %row, %nctaid.y;\n"
	"	mul.lo.u32 %last, %parts, %row;\n"
	"	sub.u32 %last, %last, 1;\n"
	"	atom.global.inc.u32 %part, [%list], %last;\n"
	"	setp.ne.u32 %not, %part, %last;\n"
	"	@%not bra out;\n"
	"	membar.sys;\n"
	"	ld.param.u32 %part, [ranges+392];\n"
	"	st.volatile.global.u32 [%at], %part;\n"
	"out:\n"
	"	ret;\n"
	"}\n";

CUresult make_cuModuleLoadData(CUmodule *module, const void *image);
CUresult make_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name);

CUresult mpsd_own_kernel(CUfunction *function, const char *image, const char *name)
{
	CUmodule module;
	CUfunction fresh;
	CUresult result;

	if (*function)
		return CUDA_SUCCESS;
	result = make_cuModuleLoadData(&module, image);
	if (result == CUDA_SUCCESS)
		result = make_cuModuleGetFunction(&fresh, module, name);
	if (mpsd_is_left())
		return MPSD_AGAIN;
	if (result == CUDA_SUCCESS)
		__atomic_store_n(function, fresh, __ATOMIC_RELEASE);
	return result;
}

CUfunction mpsd_own_if_any(struct mpsd_own *own, const char *image, const char *name)
{
	CUresult result;

	if (own->function || own->is_refused || mpsd_capturing())
		return own->function;
	result = mpsd_own_kernel(&own->function, image, name);
	own->is_refused = result != CUDA_SUCCESS && result != MPSD_AGAIN && !mpsd_is_loss(result);
	return own->function;
}

static struct mpsd_own savers;

/* NULL: copies do as well, once more of them. */
static CUfunction kernel(void)
{
	return mpsd_own_if_any(&savers, code, "mpsd_save_ranges");
}

static CUresult copy(CUdeviceptr to, CUdeviceptr from, uint64_t size, CUstream stream)
{
	return real_cuMemcpyDtoDAsync_v2(to, from, size, stream);
}

static CUresult copy_together(struct ranges *ranges, unsigned int count, CUfunction own, CUstream stream,
			      struct mpsd_saver_mark *mark)
{
	void *parameters[] = { ranges };
	CUresult result = CUDA_SUCCESS;

	if (own && count && (mark || count > 1)) {
		if (mark) {
			ranges->word = (CUdeviceptr)mark->word;
			ranges->number = mark->number;
			ranges->counter = mark->counter;
			mark->is_made = true;
		}
		return real_cuLaunchKernel(mpsd_native(own), PARTS, count, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
	}
	for (unsigned int i = 0; i < count && result == CUDA_SUCCESS; i++)
		result = copy(ranges->each[i].to, ranges->each[i].from, ranges->each[i].size, stream);
	return result;
}

/* `own`: copies ranges of `most` bytes together, behind the others; NULL: there is none. */
static CUresult copy_all(const struct mpsd_saved *saved, unsigned int count, CUfunction own, uint64_t most,
			 CUstream stream, struct mpsd_saver_mark *mark)
{
	struct ranges ranges = { 0 };
	CUresult result = CUDA_SUCCESS;
	unsigned int together = 0;

	for (const struct mpsd_saved *each = saved; each < saved + count && result == CUDA_SUCCESS; each++) {
		if (each->is_mapped && each->size <= most)
			ranges.each[together++] = (__typeof__(ranges.each[0])){ each->to, each->from, each->size };
		else
			result = copy(each->to, each->from, each->size, stream);
	}
	return result == CUDA_SUCCESS ? copy_together(&ranges, together, own, stream, mark) : result;
}

CUresult mpsd_saver_copy(const struct mpsd_saved *saved, unsigned int count, CUstream stream, struct mpsd_saver_mark *mark)
{
	return copy_all(saved, count, mark || count > 1 ? kernel() : NULL, MOST_BYTES, stream, mark);
}

/*
 * The program stands still meanwhile: each call of the driver's counts, and the GPU has nothing else of it to do. Both ways
 * come to the same, and one that was begun can be done once more.
 */
CUresult mpsd_saver_put_back(const struct mpsd_saved *saved, unsigned int count, CUstream stream)
{
	CUfunction own = __atomic_load_n(&savers.function, __ATOMIC_ACQUIRE);
	CUresult result = copy_all(saved, count, own, UINT64_MAX, stream, NULL);

	if (!own || result == CUDA_SUCCESS || mpsd_is_loss(result))
		return result;
	return copy_all(saved, count, NULL, 0, stream, NULL);
}

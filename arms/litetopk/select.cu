// Seed and select of litetopk_cuda and litetopk_windowed, one CTA a row, and the latter's gate. The k-th largest of a row is found
// by radix selection in shared memory, 11 bits at a time over the bits in which the row's keys differ. certify.Scanner says what seed and
// select give. Candidates hold no NaN; a sample may, and a NaN is the lowest there.
#include <cuda_runtime.h>
#include <cstdint>

namespace {

constexpr int kThreads = 512, kBins = 2048, kBits = 11, kFailed = 3;  // kFailed: arms.topk.WAYS

struct Scratch {
  int bin[kBins], warp[kThreads / 32], digit, left, equal;
  uint32_t low, high;
};

// The bits of a float as an unsigned integer in the order of the floats, and back. NaN of either sign is lowest.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? 0 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

__device__ float unordered(uint32_t key) { return __uint_as_float(key & 0x80000000 ? key & 0x7FFFFFFF : ~key); }

// Make keys relative to the smallest; returns it, and how many bits the largest then has. Barriers on both ends.
__device__ uint32_t rebase(uint32_t *key, int n, int &bits, Scratch &s) {
  if (threadIdx.x == 0) s.low = ~0u, s.high = 0;
  __syncthreads();
  uint32_t low = ~0u, high = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) low = min(low, key[i]), high = max(high, key[i]);
  low = __reduce_min_sync(~0u, low), high = __reduce_max_sync(~0u, high);
  if (threadIdx.x % 32 == 0) atomicMin(&s.low, low), atomicMax(&s.high, high);
  __syncthreads();
  low = s.low, bits = s.high > low ? 32 - __clz(s.high - low) : 0;
  for (int i = threadIdx.x; i < n; i += kThreads) key[i] -= low;
  __syncthreads();
  return low;
}

// The bin in which the rank-th largest lies: s.digit, and s.left, its rank inside that bin, and s.equal, how many are in it.
__device__ void find_bin(int rank, Scratch &s) {
  constexpr int kEach = kBins / kThreads;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, top = kBins - 1 - threadIdx.x * kEach;
  int mine = 0;
  for (int i = 0; i < kEach; i++) mine += s.bin[top - i];
  int sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) s.warp[warp] = sum;
  __syncthreads();
  for (int i = 0; i < warp; i++) sum += s.warp[i];
  int before = sum - mine;
  if (before < rank && rank <= sum) {
    int i = 0;
    while (before + s.bin[top - i] < rank) before += s.bin[top - i++];
    s.digit = top - i, s.left = rank - before, s.equal = s.bin[top - i];
  }
  __syncthreads();
}

// The rank-th largest of key[0, n), all below 2^bits. Leaves in s.left how many of the keys equal to it belong to the `rank` largest.
__device__ uint32_t kth(const uint32_t *key, int n, int rank, int bits, Scratch &s) {
  uint64_t prefix = 0;
  for (int top = max(bits, 1); top > 0;) {
    const int shift = max(top - kBits, 0);
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.bin[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads)
      if (uint64_t(key[i]) >> top == prefix) atomicAdd(&s.bin[key[i] >> shift & ((1 << (top - shift)) - 1)], 1);
    __syncthreads();
    find_bin(rank, s);
    prefix = prefix << (top - shift) | s.digit, rank = s.left, top = shift;
    __syncthreads();
  }
  return uint32_t(prefix);
}

__global__ void __launch_bounds__(kThreads) seed_row(const float *score, long long stride, const int *position, const int *first,
                                                     const int *last, const int *ks, const int *ke, float *threshold, int topk, int whole,
                                                     float sigmas, float factor) {
  extern __shared__ uint32_t key[];
  __shared__ Scratch s;
  const int row = blockIdx.x, start = first[row], columns = last[row] - start, length = max(ke[row] - ks[row], 1);
  score += row * stride + start, position += start;
  int mine = 0;
  for (int i = threadIdx.x; i < columns; i += kThreads) {
    const bool usable = position[i] >= ks[row] && position[i] < ke[row] && !isnan(score[i]);
    key[i] = usable ? ordered(score[i]) : 0;
    mine += usable;
  }
  if (threadIdx.x == 0) s.equal = 0;
  __syncthreads();
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) atomicAdd(&s.equal, mine);
  __syncthreads();
  const int found = s.equal;
  const float root = (sigmas + sqrtf(sigmas * sigmas + 4.f * found * (float(topk) / length))) * .5f;
  const int rank = int(ceilf(root * root * factor));
  float t = -INFINITY;
  if (length > whole && rank <= found) {
    int bits;
    const uint32_t low = rebase(key, columns, bits, s);
    t = unordered(kth(key, columns, rank, bits, s) + low);
  }
  if (threadIdx.x == 0) threshold[row] = t;
}

// Of the keys equal to t, the one of the `left`-th smallest position is the last that is chosen.
__device__ int position_limit(const uint32_t *key, const uint64_t *strict, const uint64_t *tied, int above, int n, uint32_t t, int left) {
  int limit = 0;
  for (int bit = 30; bit >= 0; bit--) {
    int lower = 0;
    for (int i = threadIdx.x; i < n; i += kThreads)
      lower += key[i] == t && int(uint32_t(i < above ? strict[i] : tied[i - above])) < limit + (1 << bit);
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    lower = __reduce_add_sync(~0u, lower);
    if (threadIdx.x % 32 == 0) atomicAdd(&total, lower);
    __syncthreads();
    if (total < left) limit += 1 << bit;
    __syncthreads();
  }
  return limit;
}

__global__ void __launch_bounds__(kThreads) select_row(const uint64_t *candidate, const int *count, const float *threshold, int *index,
                                                       float *value, int *status, float *bound, int topk, int capacity, int ties) {
  extern __shared__ uint32_t key[];
  __shared__ Scratch s;
  const size_t row = blockIdx.x;
  const int above = min(count[row * 2], capacity), n = above + min(count[row * 2 + 1], ties), need = min(n, topk);
  const bool fits = count[row * 2] <= capacity, everything = fits && count[row * 2 + 1] <= ties && threshold[row] == -INFINITY;
  const bool good = everything || (fits && n >= topk);
  const uint64_t *strict = candidate + row * (capacity + ties), *tied = strict + capacity;
  index += row * topk, value += row * topk;
  if (threadIdx.x == 0) status[row] = good ? 0 : kFailed, bound[row] = NAN;
  for (int i = (good ? need : 0) + threadIdx.x; i < topk; i += kThreads) index[i] = -1;
  if (n == 0 || (!good && n < topk)) return;
  for (int i = threadIdx.x; i < n; i += kThreads) key[i] = ordered(__uint_as_float(uint32_t((i < above ? strict[i] : tied[i - above]) >> 32)));
  int bits;
  const uint32_t low = rebase(key, n, bits, s), t = kth(key, n, need, bits, s);
  const int left = s.left, equal = s.equal;
  if (threadIdx.x == 0 && n >= topk) bound[row] = unordered(t + low);
  if (!good) return;
  const int limit = equal > left ? position_limit(key, strict, tied, above, n, t, left) : INT_MAX;
  __syncthreads();
  if (threadIdx.x == 0) s.digit = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) {
    if (key[i] < t) continue;
    const int place = int(uint32_t(i < above ? strict[i] : tied[i - above]));
    if (key[i] == t && place > limit) continue;
    const int slot = atomicAdd(&s.digit, 1);
    index[slot] = place, value[slot] = unordered(key[i] + low);
  }
}

// The gate of litetopk_windowed, one warp a row: of `width` scores of keys from `from` on, keep what reaches the row's threshold.
__global__ void gate_row(const float *score, long long stride, int from, int width, const int *ks, const int *ke, const float *threshold,
                         uint64_t *candidate, int *count, int num_q, int capacity, int ties) {
  __shared__ int counted[8][2];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x * 8 + warp;
  if (row >= num_q) return;
  const int begin = max(ks[row] - from, 0), end = min(ke[row] - from, width);
  const float t = threshold[row];
  int *mine = counted[warp];
  if (lane < 2) mine[lane] = count[row * 2 + lane];
  __syncwarp();
  score += row * stride, candidate += size_t(row) * (capacity + ties);
  for (int i = begin / 4 * 4 + lane * 4; i < end; i += 128) {
    const float4 four = *reinterpret_cast<const float4 *>(score + i);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!(x[j] >= t) || i + j < begin || i + j >= end) continue;
      const bool tie = x[j] == t;
      const int slot = atomicAdd(&mine[tie], 1);
      if (slot < (tie ? ties : capacity))
        candidate[slot + (tie ? capacity : 0)] = uint64_t(__float_as_uint(x[j])) << 32 | uint32_t(from + i + j);
    }
  }
  __syncwarp();
  if (lane < 2) count[row * 2 + lane] = mine[lane];
}

template <typename Kernel>
int room(Kernel kernel, int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

}  // namespace

extern "C" {

// width: the most columns of a row's sample. Both return a cudaError_t.
int seed_rows(const float *score, long long stride, const int *position, const int *first, const int *last, const int *ks, const int *ke,
              float *threshold, int num_q, int topk, int whole, int width, float sigmas, float factor, cudaStream_t stream) {
  if (int error = room(seed_row, width * 4)) return error;
  seed_row<<<num_q, kThreads, width * 4, stream>>>(score, stride, position, first, last, ks, ke, threshold, topk, whole, sigmas, factor);
  return cudaGetLastError();
}

int select_rows(const uint64_t *candidate, const int *count, const float *threshold, int *index, float *value, int *status, float *bound,
                int num_q, int topk, int capacity, int ties, cudaStream_t stream) {
  const int bytes = (capacity + ties) * 4;
  if (int error = room(select_row, bytes)) return error;
  select_row<<<num_q, kThreads, bytes, stream>>>(candidate, count, threshold, index, value, status, bound, topk, capacity, ties);
  return cudaGetLastError();
}

// score: fp32 [num_q, stride], 16-byte aligned rows, columns of the keys [from, from + width); width % 4 == 0 or the row padded to it.
// Adds to candidate and count, which belong to one threshold for all windows.
int gate_rows(const float *score, long long stride, int from, int width, const int *ks, const int *ke, const float *threshold,
              uint64_t *candidate, int *count, int num_q, int capacity, int ties, cudaStream_t stream) {
  gate_row<<<(num_q + 7) / 8, 256, 0, stream>>>(score, stride, from, width, ks, ke, threshold, candidate, count, num_q, capacity, ties);
  return cudaGetLastError();
}
}

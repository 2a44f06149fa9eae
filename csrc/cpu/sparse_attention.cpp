// Attention of rows at any positions over vLLM's paged cache on a CPU, in fp32.
//
// A tile is some rows of one request with all query heads of a KV head: the rows of a matrix that
// meets a block of keys at a time. Keys up to a tile's first row are seen by all of it, so only the
// blocks behind that are masked. vLLM's own kernel wants the rows of a tile to be the last ones of
// their keys, so it takes rows that stand alone one by one, and reads their keys once each.
//
// Compiled once for each width of vectors (-mavx512f: 16 floats, -mavx2 -mfma: 8). Nothing here is
// Python's or torch's: attention/cpu_kernel.py calls attend() by its C name.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int kLanes = 16;
constexpr int kRows = 6, kColumns = 4;  // 24 of 32 registers accumulate
#else
constexpr int kLanes = 8;
constexpr int kRows = 6, kColumns = 2;  // 12 of 16
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes), aligned(4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Vector*>(to) = x; }
inline Vector all(float x) { return x - Vector{}; }  // 0 + x is not x where x is -0

// 2^x with a relative error of some 1e-7; 0 below the normal numbers, for x below 127.
inline Vector exp2_of(Vector x) {
  const Vector low = x > -126.0f ? x : all(-126.0f), bounded = low < 127.0f ? low : all(127.0f);
  const Vector whole = (bounded + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: to the nearest
  const Vector rest = bounded - whole;
  Vector y = all(1.5252734e-5f);
  y = y * rest + 1.5403530e-4f;
  y = y * rest + 1.3333558e-3f;
  y = y * rest + 9.6181291e-3f;
  y = y * rest + 5.5504109e-2f;
  y = y * rest + 2.4022651e-1f;
  y = y * rest + 6.9314718e-1f;
  y = y * rest + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Vector scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x > -126.0f ? y * scale : Vector{};
}

// Lanes with others in their places, for sums and maxima over all of them.
template <int kStep>
inline Vector swapped(Vector x) {
  Ints from;
  for (int i = 0; i < kLanes; ++i) from[i] = i ^ kStep;
  return __builtin_shuffle(x, from);
}

template <int kStep = kLanes / 2>
inline float sum_of(Vector x) {
  x += swapped<kStep>(x);
  if constexpr (kStep > 1) return sum_of<kStep / 2>(x);
  return x[0];
}

template <int kStep = kLanes / 2>
inline float max_of(Vector x) {
  const Vector y = swapped<kStep>(x);
  x = y > x ? y : x;
  if constexpr (kStep > 1) return max_of<kStep / 2>(x);
  return x[0];
}

// c[r][0 .. C vectors) (+)= sum over i of a[r][i] * b[i][0 .. C vectors), for kRows rows.
template <int C, bool kAdd>
inline void product(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
                    int64_t c_row, int count) {
  Vector sum[kRows][C];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < C; ++v) sum[r][v] = kAdd ? load(c + r * c_row + v * kLanes) : Vector{};
  for (int i = 0; i < count; ++i) {
    Vector x[C];
    for (int v = 0; v < C; ++v) x[v] = load(b + i * b_row + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vector y = all(a[r * a_row + i]);
      for (int v = 0; v < C; ++v) sum[r][v] += y * x[v];
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < C; ++v) store(c + r * c_row + v * kLanes, sum[r][v]);
}

// The same for any number of rows, a multiple of kRows, and of columns, a multiple of kLanes.
template <bool kAdd>
void products(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c, int64_t c_row,
              int rows, int columns, int count) {
  for (int first = 0; first < columns;) {
    const int left = (columns - first) / kLanes;
    const int width = left >= kColumns ? kColumns : left >= 2 ? 2 : 1;
    for (int r = 0; r < rows; r += kRows) {
      const float* x = a + r * a_row;
      float* y = c + r * c_row + first;
      if (width == kColumns)
        product<kColumns, kAdd>(x, a_row, b + first, b_row, y, c_row, count);
      else if (width == 2)
        product<2, kAdd>(x, a_row, b + first, b_row, y, c_row, count);
      else
        product<1, kAdd>(x, a_row, b + first, b_row, y, c_row, count);
    }
    first += width * kLanes;
  }
}

// A cache line's beginning, at most 15 floats on.
inline float* lined_up(float* at) {
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
}

constexpr float kLog2e = 1.44269504088896340736f;

}  // namespace

extern "C" {

struct Attention {
  const float* query;  // [num_rows, num_heads, head_size]
  const float*
      cache;   // [num_blocks, num_kv_heads, K: head_size x block_size, V: block_size x head_size]
  float* out;  // [num_rows, num_heads, head_size]
  const int32_t* block_table;  // [num_reqs, max_num_blocks]
  const int64_t* last_keys;    // [num_rows]
  const int32_t* tiles;        // [num_tiles, 3]: first row, rows, request; the long ones first
  const float* sinks;          // [num_heads], or null
  int64_t query_row, query_head, out_row, out_head, cache_block, cache_head, table_row;
  int32_t num_tiles, num_kv_heads, group, head_size, block_size;
  int32_t window;  // keys that a row sees, its own included; 0: all
  float scale, softcap;
};

// Writes every row's attention to `out`. Sizes of heads and blocks are multiples of lanes().
void attend(const Attention* given) {
  const Attention& a = *given;
  const int num_items = a.num_tiles * a.num_kv_heads;
  const int size = a.head_size, block = a.block_size;
#pragma omp parallel
  {
    std::vector<float> memory, most, total;
#pragma omp for schedule(dynamic, 1)
    for (int item = 0; item < num_items; ++item) {
      const int32_t* tile = a.tiles + 3 * (item / a.num_kv_heads);
      const int kv_head = item % a.num_kv_heads;
      const int first_row = tile[0], num_rows = tile[1];
      const int count = num_rows * a.group, rows = (count + kRows - 1) / kRows * kRows;
      memory.resize(static_cast<size_t>(rows) * (2 * size + block) + 16);
      float* q = lined_up(memory.data());
      float* acc = q + rows * size;
      float* s = acc + rows * size;
      std::fill(q + count * size, acc + rows * size, 0.0f);
      most.assign(rows, -INFINITY);
      total.assign(rows, 0.0f);

      int64_t first = INT64_MAX, last = -1;
      for (int r = 0; r < num_rows; ++r) {
        first = std::min(first, a.last_keys[first_row + r]);
        last = std::max(last, a.last_keys[first_row + r]);
        for (int g = 0; g < a.group; ++g)
          std::memcpy(
              q + (r * a.group + g) * size,
              a.query + (first_row + r) * a.query_row + (kv_head * a.group + g) * a.query_head,
              size * sizeof(float));
      }
      const int64_t begin = a.window ? std::max<int64_t>(0, first - a.window + 1) : 0;
      const float to_log2 = a.softcap > 0 ? a.softcap * kLog2e : a.scale * kLog2e;

      for (int64_t at = begin / block; at <= last / block; ++at) {
        const int64_t start = at * block;
        const int from = static_cast<int>(std::max<int64_t>(0, begin - start));
        const int end = static_cast<int>(std::min<int64_t>(block, last + 1 - start));
        const float* k = a.cache + a.block_table[tile[2] * a.table_row + at] * a.cache_block +
                         kv_head * a.cache_head;
        const float* v = k + static_cast<int64_t>(block) * size;
        const int columns = (end + kLanes - 1) / kLanes * kLanes;
        products<false>(q, size, k, block, s, block, rows, columns, size);
        const bool masked =
            start + block - 1 > first || from > 0 || (a.window && start <= last - a.window);
        // the next block comes to the second cache beside the softmax, a part with each row
        const float* next =
            at < last / block
                ? a.cache + a.block_table[tile[2] * a.table_row + at + 1] * a.cache_block +
                      kv_head * a.cache_head
                : k;
        const int part = 2 * block * size / rows;
        for (int r = 0; r < rows; ++r) {
          for (int i = 0; i < part; i += 16) __builtin_prefetch(next + r * part + i, 0, 2);
          float* x = s + r * block;
          if (masked) {  // what the last block holds behind the last key may be anything
            const int64_t key = a.last_keys[first_row + std::min(r / a.group, num_rows - 1)];
            const int64_t low = a.window ? key - a.window + 1 : 0;
            for (int i = 0; i < columns; ++i)
              if (start + i > key || start + i < low) x[i] = -INFINITY;
          }
          Vector peak = all(-INFINITY);
          if (a.softcap > 0) {
            const float into = 2 * kLog2e * a.scale / a.softcap;
            for (int i = 0; i < columns; i += kLanes) {
              const Vector y = load(x + i);
              const Vector capped = 1.0f - 2.0f / (1.0f + exp2_of(y * into));
              store(x + i, y == -INFINITY ? y : capped);
            }
          }
          for (int i = 0; i < columns; i += kLanes) {
            const Vector y = load(x + i);
            peak = y > peak ? y : peak;
          }
          const float before = most[r], now = std::max(before, max_of(peak) * to_log2);
          if (now == -INFINITY) {  // no key of this block, and none before
            std::fill(x, x + columns, 0.0f);
            continue;
          }
          most[r] = now;
          Vector sum{};
          for (int i = 0; i < columns; i += kLanes) {
            const Vector p = exp2_of(load(x + i) * to_log2 - now);
            store(x + i, p);
            sum += p;
          }
          const float kept = before == -INFINITY ? 0.0f : std::exp2(before - now);
          total[r] = total[r] * kept + sum_of(sum);
          if (kept != 1.0f)
            for (int d = 0; d < size; d += kLanes)
              store(acc + r * size + d, load(acc + r * size + d) * kept);
        }
        products<true>(s + from, block, v + from * size, size, acc, size, rows, size, end - from);
      }

      for (int r = 0; r < count; ++r) {
        const int head = kv_head * a.group + r % a.group;
        float sum = total[r], factor = 1.0f;
        if (a.sinks != nullptr) {
          const float sink = a.sinks[head] * kLog2e, now = std::max(most[r], sink);
          factor = std::exp2(most[r] - now);
          sum = sum * factor + std::exp2(sink - now);
        }
        float* to = a.out + (first_row + r / a.group) * a.out_row + head * a.out_head;
        for (int d = 0; d < size; d += kLanes)
          store(to + d, load(acc + r * size + d) * (factor / sum));
      }
    }
  }
}

// Heads and blocks must be multiples of this.
int32_t lanes() { return kLanes; }
}

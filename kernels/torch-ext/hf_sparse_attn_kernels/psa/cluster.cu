// The decode step of Progressive Sparse Attention in one launch: a cluster of CLUSTER blocks for each row and KV head
// appends the token, scores the blocks of 32 tokens, and reads them, best first, until enough is read. Below, a page is
// such a block of tokens, as elsewhere in these kernels; a block is one of threads. Compiled with _cluster.cuh,
// _cluster_step.cuh and _cluster_pages.cuh before it and these macros: CLUSTER (2 to 16), THREADS (of a block, 256 or
// 512), BLOCKS (that a multiprocessor has registers for), GROUP (1 to 8), REDUCE (0: softmax, 1: mean, 2: max),
// FIXED_BYTES (set apart for Shared); for benchmarks CLOCKS, see MARK.
//
// The pages are ranked only as far as they are read, a batch at a time: the counts of bins of scores say which pages
// follow, every block gets them all, and sorts them. They are attended to in waves: in the first one half a page a warp,
// then a page. Every block gets the weights of all pages of the wave, and finds the microbatch after which enough is
// read. A warp adds up what it attended to once it is known to be read. Nothing depends on the order of arrival.

struct Arguments {
  const u16 *query, *new_key, *new_value;                          // bf16
  u16 *keys, *values;                                              // bf16
  s8 *page_min, *page_max, *page_exponent, *channel_exponent;      // the exponents are contiguous
  const int *seq_start, *seq_end;
  u64* counter;                                                    // [4], or null
  u16* out;                                                        // bf16 [batch, q_heads, HEAD_DIM]
  float* lse;                                                      // [batch, q_heads]
  int* block_order;                                                // [batch, kv_heads, max_blocks]: the pages read
  int* read_counts;                                                // [batch, kv_heads]
  long long query_b, query_h, query_d, new_key_b, new_key_h, new_value_b, new_value_h;  // strides, in elements
  long long keys_b, keys_h, keys_n, values_b, values_h, values_n;
  long long min_b, min_h, min_p, max_b, max_h, max_p;
  int kv_heads, capacity, max_pages, num_pages, max_blocks, sink_blocks, recent_blocks;
  int local_pages;                                                 // most pages of a block, a multiple of 32
  int microbatch, first_wave, wave;                                // pages; waves are whole microbatches
  int forced;                                                      // first pages, which `by_mean` leaves out
  int by_mean;                                                     // the rest weighs as a microbatch's mean, not the least page
  int whole_range;                                                 // bounds are minimum and maximum
  float scale, log2_odds;                                          // of the threshold
};

constexpr int PAGE = 32, HALF = 16;
constexpr int BINS = 512;
constexpr int MOST_LISTED = 1024;                         // pages that a batch may have; about as many has the first one,
constexpr int LISTED_FIRST = 256, LISTED = 768;           // and each of the others, by whole bins
constexpr int CROWDED = 256;                              // more pages of a bin than are to be compared with one another
constexpr u32 NEWEST = FORCED + 1;                        // the last pages, of which the newest is the first
constexpr int EVEN_WEIGHTS = BARRIERS, ODD_WEIGHTS = BARRIERS + 1;

DEVICE float infinity() { return as_float(0x7F800000u); }

enum class Stage { START, QUERY, SCORES, EXCHANGE, BINS, LIST, RANK, ATTEND, STOP, MERGE, WRITE };  // STAGES in cluster.py

struct Shared {
  Words4 counts_in[2][CLUSTER][BINS / 8];                 // u16 of each block's bins
  Words4 output_in[CLUSTER][QUADS_EACH];
  alignas(16) u8 query_bytes[2][8 * SETS][HEAD_DIM];      // magnitudes where positive, where negative; high, low by turns
  alignas(16) u16 query[GROUP][HEAD_DIM + 8];
  alignas(16) u16 page_keys[PAGE][HEAD_DIM];              // of the new token's page
  u64 listed[MOST_LISTED], sorted[MOST_LISTED];           // ranks of a batch
  u64 barriers[BARRIERS + 2];
  MaxSum warp_lse[1 + WARPS][GROUP], lse_in[CLUSTER][GROUP], warp_output[WARPS][GROUP], sums_in[CLUSTER][GROUP];
  float weights_in[2][GROUP][CLUSTER * WARPS];            // log2 of the sums of a wave's half pages
  float lower[HEAD_DIM], upper[HEAD_DIM];                 // of the new token's page, in units of the channels' exponents
  int channel_exponent[HEAD_DIM];
  float unit[GROUP], lse[GROUP];
  u32 largest[GROUP * 4], page_largest[HEAD_DIM / 32];
  u32 enough[2][GROUP];                                   // bits of a wave's microbatches
  alignas(16) u32 histogram[BINS];
  int first[BINS + 1], place[BINS];                       // of each bin in a batch: its first place, the block's next one
  float greatest[GROUP];                                  // scores
  int warp_total[WARPS], edge, above, level;
};

struct Place {
  int tid, lane, warp, g, t;                              // lane = 4 g + t, as the tensor cores number rows and columns
  int rank, pair, row, head;
  int start, end, length, pages, row_pages;               // row_pages: those that may be read
  int new_page, last_page;                                // the new token's; that one, or row_pages if it is not scored
  int tiles;                                              // of this block
  bool appends;
};

// ---- the new token

// A channel of the token, and the channel's exponent; of threads below HEAD_DIM.
struct NewToken {
  u16 key, value, partner;
  int exponent;
};

DEVICE NewToken load_token(const Arguments& a, const Place& at) {
  const u16* key = a.new_key + at.row * a.new_key_b + at.head * a.new_key_h;
  const u16* value = a.new_value + at.row * a.new_value_b + at.head * a.new_value_h;
  return NewToken{key[at.tid], value[at.tid], key[at.tid ^ HEAD_DIM / 2], a.channel_exponent[(long long)at.pair * HEAD_DIM + at.tid]};
}

// The keys of the token's page before it.
DEVICE void load_page(Shared& s, const Arguments& a, const Place& at) {
  const int others = (at.length - 1) % PAGE;
  const u16* first = a.keys + at.row * a.keys_b + at.head * a.keys_h + (at.end - 1 - others) * a.keys_n;
#pragma unroll 1
  for (int i = at.tid; i < others * (HEAD_DIM / 8); i += THREADS) {
    const int token = i / (HEAD_DIM / 8), part = i % (HEAD_DIM / 8);
    *(Words4*)&s.page_keys[token][8 * part] = load16<0>(first + token * a.keys_n + 8 * part, true);
  }
}

// Write the token, and compute its page's bounds from all of its keys: their range, or its centre with, on both sides,
// their mean distance from it. Threads below HEAD_DIM, a channel each. The sum is pairwise, as in the reference.
DEVICE void append(Shared& s, const Arguments& a, const Place& at, const NewToken& token) {
  const int d = at.tid, others = (at.length - 1) % PAGE;
  a.keys[at.row * a.keys_b + at.head * a.keys_h + (at.end - 1) * a.keys_n + d] = token.key;
  a.values[at.row * a.values_b + at.head * a.values_h + (at.end - 1) * a.values_n + d] = token.value;
  const float key = bf16(token.key);
  int exponent = token.exponent;
  if (at.length == 1) {
    exponent = clamp(exponent_for(fmaxf(fabsf(key), fabsf(bf16(token.partner))), 3407872), -60, 60);  // 90 levels
    a.channel_exponent[(long long)at.pair * HEAD_DIM + d] = (s8)exponent;
  }
  float keys[PAGE], lower = key, upper = key;
#pragma unroll
  for (int i = 0; i < PAGE; i++) {
    keys[i] = i < others ? bf16(s.page_keys[i][d]) : key;
    lower = fminf(lower, keys[i]), upper = fmaxf(upper, keys[i]);
  }
  const float centre = lower * 0.5f + upper * 0.5f;
#pragma unroll
  for (int i = 0; i < PAGE; i++) keys[i] = i <= others ? fabsf(centre - keys[i]) : 0.f;
#pragma unroll
  for (int level = 1; level <= 5; level++)
#pragma unroll
    for (int i = 0; i < PAGE / 2; i++)
      if (i < PAGE >> level) keys[i] += keys[i + (PAGE >> level)];
  const float deviation = keys[0] / (float)(others + 1), unit = power_of_two(-exponent);
  if (!a.whole_range) lower = centre - deviation, upper = centre + deviation;
  lower *= unit, upper *= unit;
  s.lower[d] = lower, s.upper[d] = upper, s.channel_exponent[d] = exponent;
  const u32 largest = warp_max(as_bits(fmaxf(fabsf(lower), fabsf(upper))));
  if (at.lane == 0) s.page_largest[at.warp] = largest;
}

// The levels of the page's bounds, and the page's scores; one warp, with four channels a lane.
DEVICE void score_new_page(Shared& s, const Arguments& a, const Place& at, float* scores, int stride) {
  const int d = at.lane * 4;
  const u32 largest = max(max(s.page_largest[0], s.page_largest[1]), max(s.page_largest[2], s.page_largest[3]));
  const int exponent = clamp(exponent_for(as_float(largest), 8257536), 0, 60);   // 127 levels
  const float down = power_of_two(-exponent);
  s8* page_min = a.page_min + at.row * a.min_b + at.head * a.min_h + at.new_page * a.min_p + d;
  s8* page_max = a.page_max + at.row * a.max_b + at.head * a.max_h + at.new_page * a.max_p + d;
  float lower[4], upper[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    lower[i] = clamp(floorf(s.lower[d + i] * down), -127.f, 127.f);
    upper[i] = clamp(ceilf(s.upper[d + i] * down), -127.f, 127.f);
    page_min[i] = (s8)lower[i], page_max[i] = (s8)upper[i];
  }
  if (at.lane == 0) a.page_exponent[(long long)at.pair * a.max_pages + at.new_page] = (s8)exponent;
  if (at.new_page >= at.row_pages) return;
#pragma unroll
  for (int h = 0; h < GROUP; h++) {
    float score = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float q = bf16(s.query[h][d + i]) * power_of_two(s.channel_exponent[d + i]);
      score += fmaxf(q * lower[i], q * upper[i]);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) score += shuffle_xor(score, mask);
    score *= a.scale * LOG2_E * power_of_two(exponent);
    if (at.lane == 0) {
      scores[h * stride + (at.new_page / TILE / CLUSTER) * TILE + at.new_page % TILE] = score;
      s.warp_lse[0][h] = MaxSum{score, 1.f};
    }
  }
}

DEVICE void score_pages(Shared& s, const Arguments& a, const Bounds& bounds, Place& at, float* scores, int stride) {
  at.start = a.seq_start[at.row], at.end = a.seq_end[at.row];
  const QueryParts query = load_query(a, at);             // before the tiles, behind which it would have to wait
  NewToken token = {};
  if (at.tid < HEAD_DIM) token = load_token(a, at);
  Tile tiles[2];                                          // in flight before the row's length is known
  load_tile(tiles[0], bounds, at.warp);
  load_tile(tiles[1], bounds, at.warp + WARPS);
  if (at.tid < GROUP) s.warp_lse[0][at.tid] = MaxSum{LOW, 0.f};
#pragma unroll 1
  for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
  at.length = max(at.end - at.start, 0);
  at.pages = (at.length + PAGE - 1) / PAGE;
  at.row_pages = min(at.pages, a.num_pages);
  at.new_page = max(at.pages - 1, 0);
  at.last_page = min(at.new_page, at.row_pages);
  at.tiles = ((at.row_pages + TILE - 1) / TILE - at.rank + CLUSTER - 1) / CLUSTER;
  at.appends = at.length > 0 && at.new_page / TILE % CLUSTER == at.rank;
  if (at.appends) load_page(s, a, at);
  float scaled[ELEMENTS];
  scale_query(s, at, query, scaled);
  sync_block();
  if (at.appends && at.tid < HEAD_DIM) append(s, a, at, token);
  split_query(s, a, at, scaled);
  sync_block();
  MARK(Stage::QUERY);
  if (at.appends && at.warp == WARPS - 1) score_new_page(s, a, at, scores, stride);
  score_tiles(s, bounds, tiles, at, scores, stride);
}

// ---- the ranks

// Key and page in one number, greater for pages to be read before; the lower page is first among equal scores.
DEVICE u64 rank_of(u32 key, int page) { return (u64)key << 16 | (u32)(key == NEWEST ? page : 0xFFFF - page); }

DEVICE int page_of_rank(u64 rank) {
  const int low = (int)(rank & 0xFFFF);
  return (u32)(rank >> 16) == NEWEST ? low : 0xFFFF - low;
}

// Bins by the score: 32 for each doubling of the distance from `top`, best first, and those that are forced in the first.
// Or parts of one of them, `divided`, if that is not -1, after one bin for all before it. Or, with `shift` below 48, by
// eight bits of the ranks that begin with `prefix`, after one bin for those with more.
struct Bins {
  float top;
  int divided, shift;
  u64 prefix;
};

DEVICE float score_of(u32 key) { return as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

DEVICE int bin_of_score(u32 key, float top, int divided = -1) {
  if (key >= FORCED) return 0;
  constexpr float LEAST = 1.f / 256.f;                    // of the distances that are told apart by doublings
  const u32 bits = as_bits(fmaxf(top - score_of(key), 0.f) + LEAST) - 0x3B800000u;
  const int bin = (int)min(bits >> 18, (u32)BINS - 1);
  if (divided < 0) return bin;
  if (bin != divided) return bin < divided ? 0 : BINS;
  return 1 + (int)min((bits - ((u32)bin << 18)) >> 9, (u32)BINS - 2);
}

DEVICE int bin_in(const Bins& bins, u64 rank) {
  if (bins.shift == 48) return bin_of_score((u32)(rank >> 16), bins.top, bins.divided);
  const u64 begin = rank >> bins.shift >> 8;
  if (begin != bins.prefix) return begin > bins.prefix ? 0 : BINS;
  return 256 - (int)(rank >> bins.shift & 255);
}

// A score that no page exceeds but by rounding: the heads' greatest ones, as if one page had them all.
DEVICE float greatest_score(Shared& s, const Place& at, const float (&lse)[GROUP], float top) {
  if (REDUCE != 0 || GROUP == 1) return top;
  if (at.warp < GROUP) {
    float greatest = at.lane < CLUSTER ? s.lse_in[at.lane][at.warp].max : LOW;
#pragma unroll
    for (int mask = 1; mask < 16; mask *= 2) greatest = fmaxf(greatest, shuffle_xor(greatest, mask));
    if (at.lane == 0) s.greatest[at.warp] = greatest;
  }
  sync_block();
  float sum = 0.f;
#pragma unroll
  for (int h = 0; h < GROUP; h++) sum += exp2_fast(s.greatest[h] - lse[h]);
  return log2_fast(sum);
}

// Replace the scores of this block's pages by keys in their order, each thread its own, and count those of each bin.
DEVICE float rank_pages(Shared& s, const Arguments& a, const Place& at, float* scores, int stride) {
  u32* keys = (u32*)scores;
  float lse[GROUP];
  const float most = load_lse(s, lse), top = greatest_score(s, at, lse, most);
#pragma unroll 2
  for (int local = at.tid; local < at.tiles * TILE; local += THREADS) {
    const int page = page_of(at, local);
    u32 key = 0;
    if (page < at.row_pages) {
      key = order_key(reduced(scores, stride, lse, local));
      if (page < a.sink_blocks) key = FORCED;
      if (page >= at.row_pages - a.recent_blocks) key = NEWEST;
      add_shared(&s.histogram[bin_of_score(key, top)]);
    }
    keys[local] = key;
  }
  return top;
}

// Add up the blocks' counts: the first place of each bin, and of this block's pages in it. Find the bin of page number
// `goal`, counted from 1: s.edge, with s.above before it and s.level in it. `call` counts the calls.
DEVICE void place_bins(Shared& s, const Place& at, int call, int goal) {
  constexpr int BINS_EACH = BINS / THREADS;
  Words4 (&counts_in)[CLUSTER][BINS / 8] = s.counts_in[call & 1];
  u64* barrier = &s.barriers[call & 1 ? ODD_COUNTS : EVEN_COUNTS];
  send_counts<BINS>(s, at, counts_in, barrier);
  wait_barrier(barrier, call >> 1 & 1);
  int count[BINS_EACH], lower[BINS_EACH], sum = 0;        // lower: of blocks before this one
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    count[i] = lower[i] = 0;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const int of_block = ((const u16*)counts_in[c])[at.tid * BINS_EACH + i];
      count[i] += of_block;
      if (c < at.rank) lower[i] += of_block;
    }
    sum += count[i];
  }
  int before = sum_before(s, at, sum);
#pragma unroll
  for (int i = 0; i < BINS_EACH; i++) {
    const int bin = at.tid * BINS_EACH + i;
    s.first[bin] = before, s.place[bin] = before + lower[i];
    if (before < goal && goal <= before + count[i]) s.edge = bin, s.above = before, s.level = count[i];
    before += count[i];
  }
  if (at.tid == THREADS - 1) s.first[BINS] = before;
  sync_block();
}

// List the pages that follow those up to rank `last`, sorted, in all blocks: at least a microbatch, or `left`.
DEVICE int list_pages(Shared& s, const Arguments& a, const Place& at, const u32* keys, float top, u64 last, int left,
                      int batch, int& call) {
  const u32 last_key = (u32)(last >> 16);
  Bins bins{batch > 0 && last_key < FORCED ? score_of(last_key) : top, -1, 48, 0};
  const int local_pages = at.tiles * TILE, goal = min(left, batch > 0 ? LISTED : LISTED_FIRST);
  const int prefetched = batch > 0 ? a.wave : a.first_wave;
  int cut, count;                                         // bins before `cut` are listed
#pragma unroll 1
  for (bool counted = batch == 0;; counted = false) {
    if (!counted) {
#pragma unroll 1
      for (int i = at.tid; i < BINS; i += THREADS) s.histogram[i] = 0;
      sync_block();
#pragma unroll 1
      for (int local = at.tid; local < local_pages; local += THREADS) {
        const int page = page_of(at, local);
        const u64 rank = rank_of(keys[local], page);
        const int bin = page < at.row_pages && rank < last ? bin_in(bins, rank) : BINS;
        if (bin < BINS) add_shared(&s.histogram[bin]);
      }
    }
    place_bins(s, at, call++, goal);
    cut = s.edge + 1, count = s.above + s.level;
    const bool divides = s.level > CROWDED && bins.divided < 0 && bins.shift == 48;
    if (count <= MOST_LISTED && !divides) break;
    cut = s.edge, count = s.above;
    if (count >= (divides ? prefetched : a.microbatch)) break;   // enough for a wave, which may be the last
    if (divides) {
      bins.divided = s.edge;
    } else {
      bins.prefix = bins.shift == 48 ? 0 : bins.prefix << 8 | (u32)(256 - s.edge);   // too many in one bin
      bins.shift -= 8;
    }
  }
  MARK(Stage::BINS);
#pragma unroll 1
  for (int local = at.tid; local < local_pages; local += THREADS) {
    const int page = page_of(at, local);
    const u64 rank = rank_of(keys[local], page);
    const int bin = page < at.row_pages && rank < last ? bin_in(bins, rank) : BINS;
    if (bin >= cut) continue;
    const int n = take_place(&s.place[bin]);
    if (n < prefetched) prefetch_page<PAGE>(a, at, page);   // about the next wave: places in a bin are not ranks
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) send(&s.listed[n], c, rank, &s.barriers[CHOICE]);
  }
  if (at.tid == 0) arm_barrier(&s.barriers[CHOICE], 8 * count);
  wait_barrier(&s.barriers[CHOICE], batch & 1);
  MARK(Stage::LIST);
#pragma unroll 1
  for (int i = at.tid; i < count; i += THREADS) {
    const u64 rank = s.listed[i];
    const int bin = bin_in(bins, rank), end = s.first[bin + 1];
    int n = s.first[bin];
#pragma unroll 4
    for (int j = n; j < end; j++) n += s.listed[j] > rank;
    s.sorted[n] = rank;
  }
  sync_block();
  MARK(Stage::RANK);
  return count;
}

// ---- attention

// Merge what was attended to before with that of a wave.
DEVICE void add_output(Output& out, const Output& wave) {
  const float top = fmaxf(out.total.max, wave.total.max);
  const float old_factor = exp2_fast(out.total.max - top), factor = exp2_fast(wave.total.max - top);
  out.total = MaxSum{top, out.total.sum * old_factor + wave.total.sum * factor};
#pragma unroll
  for (int n = 0; n < 16; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) out.sums[n][i] = out.sums[n][i] * old_factor + wave.sums[n][i] * factor;
}

// What a query head has read: the log-sum-exp, and log2 of the estimate of each page of the rest.
struct Weights {
  MaxSum total;
  float rest;
};

// Find the microbatches of a wave after which a query head has read enough; a warp, of its head, with a microbatch a
// lane. The wave's `count` pages, in `parts` each, follow the `read` ones, from `first` of the batch on. The weights of
// a microbatch are `pitch` apart.
DEVICE void find_stop(Shared& s, const Arguments& a, const Place& at, int first, int count, int parts, int pitch, int read,
                      int wave, Weights& known) {
  const int begin = at.lane * a.microbatch, size = clamp(count - begin, 0, a.microbatch);
  const float* weights = s.weights_in[wave & 1][at.warp] + at.lane;
  MaxSum total{LOW, 0.f};
#pragma unroll 4
  for (int i = 0; i < parts * size; i++) total.max = fmaxf(total.max, weights[i * pitch]);
  float rest = a.by_mean ? 0.f : infinity();
  int counted = 0;
#pragma unroll 4
  for (int i = 0; i < size; i++) {
    float weight = exp2_fast(weights[parts * i * pitch] - total.max);
    if (parts == 2) weight += exp2_fast(weights[(2 * i + 1) * pitch] - total.max);
    total.sum += weight;
    const bool complete = (page_of_rank(s.sorted[first + begin + i]) + 1) * PAGE <= at.length;
    if (!complete || (a.by_mean && read + begin + i < a.forced)) continue;
    rest = a.by_mean ? rest + weight : fminf(rest, weight);
    counted++;
  }
  rest = counted ? total.max + log2_fast(a.by_mean ? rest / counted : rest) : infinity();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const MaxSum other = {shuffle_up(total.max, distance), shuffle_up(total.sum, distance)};
    const float other_rest = shuffle_up(rest, distance);
    if (at.lane >= distance) total = merge(other, total), rest = fminf(other_rest, rest);
  }
  total = merge(known.total, total), rest = fminf(known.rest, rest);
  const float left = (float)max(at.pages - (read + begin + size), 0);
  const bool enough = total.max - rest + log2_fast(total.sum) > a.log2_odds + log2_fast(left);
  const u32 bits = warp_ballot(enough && size == a.microbatch);
  if (at.lane == 0) s.enough[wave & 1][at.warp] = bits;
  known = Weights{MaxSum{shuffle(total.max, 31), shuffle(total.sum, 31)}, shuffle(rest, 31)};
}

// Read the first `count` pages of the batch, which follow `read` ones, wave by wave, until enough is read. Returns how
// many of them were, and sets `stops`.
DEVICE int attend(Shared& s, const Arguments& a, const Place& at, int count, int read, int& wave, Weights& known,
                  Output& out, bool& stops) {
  const int unit = at.warp * CLUSTER + at.rank;           // a part of a wave
  Page page{a.keys + at.row * a.keys_b + at.head * a.keys_h, a.values + at.row * a.values_b + at.head * a.values_h,
            (u32)a.keys_n, (u32)a.values_n, 0, at.end};
  int first = 0;
#pragma unroll 1
  for (; first < count && !stops; wave++) {
    const int parts = wave == 0 ? 2 : 1, most = wave == 0 ? a.first_wave : a.wave, in_wave = min(most, count - first);
    const int pitch = most / a.microbatch, slot = unit % (parts * a.microbatch) * pitch + unit / (parts * a.microbatch);
    u64* barrier = &s.barriers[wave & 1 ? ODD_WEIGHTS : EVEN_WEIGHTS];
    Output own = {MaxSum{LOW, 0.f}, {}};
    if (unit < parts * in_wave) {
      page.first = at.start + page_of_rank(s.sorted[first + unit / parts]) * PAGE + unit % parts * HALF;
#pragma unroll 1
      for (int part = parts; part <= 2 && page.first < at.end; part++, page.first += HALF) {
        Tokens tokens;
        load_tokens(tokens, page, at);
        attend_tokens(own, tokens, s, at, at.end - page.first, a.scale * LOG2_E);
      }
      const float weight = own.total.sum > 0.f ? own.total.max + log2_fast(own.total.sum) : LOW;
#pragma unroll 1
      for (int c = at.g < GROUP ? at.t : CLUSTER; c < CLUSTER; c += 4)
        send((u32*)&s.weights_in[wave & 1][at.g][slot], c, as_bits(weight), barrier);
    }
    if (at.tid == 0) arm_barrier(barrier, parts * in_wave * GROUP * 4);
    const int next = first + in_wave + unit;
    if (wave > 0 && at.lane == 0 && unit < a.wave && next < count)   // not after the first wave, which may be the last
      prefetch_page<PAGE>(a, at, page_of_rank(s.sorted[next]));
    MARK(Stage::ATTEND);
    if (at.warp < GROUP) {
      wait_barrier(barrier, wave >> 1 & 1);
      find_stop(s, a, at, first, in_wave, parts, pitch, read + first, wave, known);
    }
    sync_block();
    u32 enough = ~0u;
#pragma unroll
    for (int h = 0; h < GROUP; h++) enough &= s.enough[wave & 1][h];
    const int kept = enough ? (count_bits((enough & (0u - enough)) - 1) + 1) * a.microbatch : in_wave;
    if (unit < parts * kept) add_output(out, own);
    if (at.rank == 0)
#pragma unroll 1
      for (int i = at.tid; i < kept; i += THREADS)
        a.block_order[(long long)at.pair * a.max_blocks + read + first + i] = page_of_rank(s.sorted[first + i]);
    first += kept, stops = enough != 0;
    MARK(Stage::STOP);
  }
  return first;
}

DEVICE void write_counts(const Arguments& a, const Place& at, int read) {
  a.read_counts[at.pair] = read;
  if (!a.counter) return;
  const int missing = at.new_page < at.row_pages ? at.pages * PAGE - at.length : 0;   // of the newest page, read first
  add_global(a.counter, (u64)max(read * PAGE - missing, 0));
  add_global(a.counter + 1, (u64)at.length);
  if (at.row_pages > 0) add_global(a.counter + 2, (u64)at.row_pages * (2 * HEAD_DIM + 1) + HEAD_DIM);
  if (at.pair == 0) add_global(a.counter + 3, 1);
}

KERNEL(progressive_step)(const Arguments a) {
  u8* memory = dynamic_shared();
  Shared& s = *(Shared*)memory;
  const int stride = a.local_pages + 8;                   // other banks for each head
  static_assert(sizeof(Shared) <= FIXED_BYTES, "what follows has a place of its own");
  float* scores = (float*)(memory + FIXED_BYTES);
  Words4* quads = (Words4*)scores;                        // after the last batch

  Place at;
  at.tid = thread_index(), at.lane = at.tid % 32, at.warp = at.tid / 32, at.g = at.lane / 4, at.t = at.lane % 4;
  at.rank = cluster_rank(), at.row = block_y(), at.head = block_x() / CLUSTER, at.pair = at.row * a.kv_heads + at.head;
  if (at.tid == 0) {
    for (int i = 0; i < BARRIERS + 2; i++) init_barrier(&s.barriers[i]);
    publish_barriers();
  }
  sync_warp();
  arrive_cluster();
  const Bounds bounds = bounds_of(a, at);
  wait_for_previous_kernel();
  let_next_kernel_start();
  MARK(Stage::START);
  score_pages(s, a, bounds, at, scores, stride);
  MARK(Stage::SCORES);
  exchange_lse<REDUCE == 0 && (GROUP > 1)>(s, at);
  MARK(Stage::EXCHANGE);
  const float top = rank_pages(s, a, at, scores, stride);

  Output out = {MaxSum{LOW, 0.f}, {}};
  Weights known{MaxSum{LOW, 0.f}, infinity()};
  const int count = min(at.row_pages, a.max_blocks);
  int read = 0, wave = 0, call = 0;
  bool stops = false;
  u64 last = ~0ull;
#pragma unroll 1
  for (int batch = 0; read < count && !stops; batch++) {
    const int left = count - read;
    int listed = min(list_pages(s, a, at, (const u32*)scores, top, last, left, batch, call), left);
    if (listed < left) listed -= listed % a.microbatch;
    last = s.sorted[listed - 1];
    read += attend(s, a, at, listed, read, wave, known, out, stops);
  }
  send_output(s, at, out, quads);
  if (at.rank == 0 && at.tid == 0) write_counts(a, at, read);
  wait_barrier(&s.barriers[OUTPUT], 0);
  MARK(Stage::MERGE);
  write_output(s, a, at);
  MARK(Stage::WRITE);
}

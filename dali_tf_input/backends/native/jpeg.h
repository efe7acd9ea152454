// Decodes JPEGs to the pixels of libjpeg-turbo (JDCT_ISLOW, fancy upsampling), line by line, on x86-64 with AVX2.
//
// It takes 8-bit baseline JPEGs of one scan: gray, or YCbCr in 4:4:4, 4:2:2 or 4:2:0, with or without restarts. It refuses
// all other files, and all that libjpeg-turbo refuses or warns about: the caller then uses libjpeg-turbo.
// Sources: ITU-T T.81 for the format; libjpeg-turbo's jidctint.c, jdsample.c and jdcolor.c for the arithmetic.
#ifndef DALI_TF_INPUT_JPEG_H_
#define DALI_TF_INPUT_JPEG_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "orientation.h"
#if defined(__x86_64__) && defined(__GNUC__)
#define DALI_TF_INPUT_JPEG 1
#include <immintrin.h>

namespace dali_tf_input::jpeg {

// The position in a block, in row-major order, of its k-th coefficient. Codes that end the block or
// are invalid lead to a `k` past the last; values written there are not read. No lookup reaches
// beyond kPlaces (see `Pair`).
constexpr int kPlaces = 63 + 128 + 2, kBlock = 80;
struct Order {
  uint8_t place[kPlaces] = {};
  constexpr Order() {
    int k = 0;
    for (int diagonal = 0; diagonal < 15; ++diagonal) {
      for (int step = 0; step <= diagonal; ++step) {
        const int row = diagonal % 2 ? step : diagonal - step, column = diagonal - row;
        if (row < 8 && column < 8) place[k++] = static_cast<uint8_t>(8 * row + column);
      }
    }
    while (k < kPlaces) place[k++] = 64;
  }
};
constexpr Order kOrder;

// The AC coefficient at the start of the next kLook bits of a scan, and the one after it if these
// bits include all of it.
constexpr int kLook = 10, kDcLook = 9;
constexpr int kMost = 18;              // bits of a code and its value in a lookup: a `Refill` is enough for three
constexpr int kEnd = 64, kLong = 128;  // as a run: the block ends; the code is too long for a lookup, or there is none
struct alignas(8) Pair {
  int16_t second;      // the value of the second
  uint8_t bits;        // of both, codes and values
  uint8_t code, size;  // bits of the first's code, and of its value
  uint8_t run;         // zeros before the first
  uint8_t step;        // places from the first to the second
  uint8_t has_second;  // 0 or 1
};

// A code of a Huffman table: its length in bits, 0 if there is none, and what it stands for.
struct Code {
  int bits, symbol;
};

// The value that `size` bits at the top of `word` stand for (T.81, F.2.2.1).
constexpr int Extend(uint64_t word, int size) {
  const int bits = static_cast<int>(word >> 1 >> (63 - size)), mask = (1 << size) - 1;
  return word >> 63 ? bits : bits - mask;
}

struct Huffman {
  bool is_set = false;
  uint8_t counts[17] = {}, symbols[256] = {};  // how many codes there are of each length; what each stands for
  uint32_t ends[17] = {};                      // of each length: what the first code too large is, in 16 bits
  int offsets[17] = {};                        // from codes of each length to symbols
  Pair pairs[1 << kLook];                      // of an AC table
  struct { uint8_t code, size; } dc[1 << kDcLook];

  // Returns the code at the top of `word`.
  Code Find(uint64_t word) const {
    const uint32_t top = static_cast<uint32_t>(word >> 48);
    for (int bits = 1; bits <= 16; ++bits) {
      if (top < ends[bits]) return {bits, symbols[(offsets[bits] + static_cast<int>(top >> (16 - bits))) & 255]};
    }
    return {0, 0};
  }

  // Prepares the lookups; returns false if the table is none, or has values that no baseline JPEG has.
  bool Build(bool is_dc) {
    uint32_t code = 0;
    int symbol = 0;
    for (int bits = 1; bits <= 16; ++bits, code <<= 1) {
      offsets[bits] = symbol - static_cast<int>(code);
      for (int number = 0; number < counts[bits]; ++number, ++symbol, ++code) {
        if (code >> bits || (is_dc ? symbols[symbol] > 11 : (symbols[symbol] & 15) > 10)) return false;
      }
      ends[bits] = code << (16 - bits);
    }
    for (uint64_t top = 0; is_dc && top < 1 << kDcLook; ++top) {
      const Code found = Find(top << (64 - kDcLook));
      dc[top] = {static_cast<uint8_t>(found.bits > kDcLook ? 0 : found.bits), static_cast<uint8_t>(found.symbol)};
    }
    for (uint64_t top = 0; !is_dc && top < 1 << kLook; ++top) pairs[top] = MakePair(top << (64 - kLook));
    return true;
  }

  Pair MakePair(uint64_t word) const {
    const Code first = Find(word);
    const bool is_end = IsEnd(first.symbol);
    const int size = first.symbol & 15, bits = first.bits + size;
    if (!first.bits || first.bits > kLook || bits > kMost) return {0, 0, 0, 0, kLong, 1, 0};
    const int run = is_end ? kEnd : first.symbol >> 4;
    Pair pair = {0, uint8_t(bits), uint8_t(first.bits), uint8_t(size), uint8_t(run), 1, 0};
    if (is_end || bits >= kLook) return pair;
    const Code second = Find(word << bits);
    const int all = bits + second.bits + (second.symbol & 15);
    if (!second.bits || all > kLook) return pair;
    pair.second = static_cast<int16_t>(Extend(word << (bits + second.bits), second.symbol & 15));
    pair.bits = static_cast<uint8_t>(all);
    pair.step = static_cast<uint8_t>(1 + (IsEnd(second.symbol) ? kEnd : second.symbol >> 4));
    pair.has_second = 1;
    return pair;
  }

  static bool IsEnd(int symbol) { return !(symbol & 15) && symbol >> 4 != 15; }
};

struct Component {
  int id, across, down;  // blocks in a minimum coded unit
  int quantization, dc, ac;
  int height, width;     // samples
  int stride;
  uint8_t* plane;        // lines of some rows of units, see `Decoder`
};

// The part of an image that is wanted, in pixels.
struct Window {
  int top, left, bottom, right;
};

// Reads what comes before the scan, and has the memory for what follows.
class Header {
 public:
  int height = 0, width = 0;
  int orientation = 1;  // of the first EXIF data

  // Returns whether the file is one for this decoder.
  bool Open(const uint8_t* data, size_t size) {
    static const bool is_supported =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    return is_supported && Parse(data, size) && Plan();
  }

 protected:
  static constexpr size_t kPadding = 4096;  // after a scan: more than a unit can take, 6 blocks of up to 1,700 bits

  int count_ = 0, restart_ = 0;  // components; units from one restart to the next, or 0
  Component components_[3];
  Huffman tables_[2][4];  // DC, AC
  alignas(32) uint16_t quantization_[4][64] = {};
  alignas(32) uint16_t limits_[4][64] = {};  // the largest coefficients, by their size, that overflow nothing
  const uint8_t *scan_ = nullptr, *end_ = nullptr;
  int across_ = 1, down_ = 1;  // 8 pixels in a unit
  int columns_ = 0, rows_ = 0;  // units
  std::vector<uint8_t> clean_, planes_;
  std::vector<uint16_t> sums_, upsampled_;

 private:
  static int Number(const uint8_t* at) { return at[0] << 8 | at[1]; }

  bool Parse(const uint8_t* data, size_t size) {
    bool is_quantized[4] = {}, is_jfif = false, is_exif = false;
    int adobe = -1;
    for (auto& kind : tables_) for (auto& table : kind) table.is_set = false;
    count_ = restart_ = 0, end_ = data + size, orientation = 1;
    if (size < 4 || data[0] != 0xFF || data[1] != 0xD8) return false;
    for (const uint8_t* at = data + 2;;) {
      if (end_ - at < 4 || *at != 0xFF) return false;
      while (at < end_ && *at == 0xFF) ++at;
      if (end_ - at < 3) return false;
      const int marker = *at++, length = Number(at) - 2;
      const uint8_t *part = at + 2, *next = part + length;
      if (length < 0 || end_ - part < length) return false;
      at = next;
      if (marker == 0xC0 || marker == 0xC1) {
        if (count_ || !ReadFrame(part, length)) return false;
      } else if (marker == 0xC4) {
        if (!ReadTables(part, length)) return false;
      } else if (marker == 0xDB) {
        for (; part < next; part += 64) {
          const int wide = part[0] >> 4, number = part[0] & 15;
          if (wide > 1 || number > 3 || next - part < 65 + 64 * wide) return false;
          ++part;
          for (int k = 0; k < 64; ++k) {
            const int value = wide ? Number(part + 2 * k) : part[k], place = kOrder.place[k];
            quantization_[number][place] = static_cast<uint16_t>(value);
            limits_[number][place] = static_cast<uint16_t>(value ? 16383 / value : 16383);
          }
          part += 64 * wide, is_quantized[number] = true;
        }
      } else if (marker == 0xDD) {
        if (length != 2) return false;
        restart_ = Number(part);
      } else if (marker == 0xE0) {
        if (length >= 5 && !std::memcmp(part, "JFIF", 5)) {
          if (length < 14 || part[5] != 1) return false;
          is_jfif = true;
        }
      } else if (marker == 0xE1) {
        if (!is_exif && length >= 6 && !std::memcmp(part, "Exif\0", 6)) {
          is_exif = true, orientation = ReadOrientation(part + 6, static_cast<size_t>(length) - 6);
        }
      } else if (marker == 0xEE) {
        if (length >= 5 && !std::memcmp(part, "Adobe", 5)) {
          if (length < 12) return false;
          adobe = part[11];
        }
      } else if (marker == 0xDA) {
        scan_ = next;
        return ReadScan(part, length, is_quantized) && (count_ == 1 || IsYcc(is_jfif, adobe));
      } else if (marker != 0xFE && marker >> 4 != 0xE) {
        return false;
      }
    }
  }

  bool ReadFrame(const uint8_t* part, int length) {
    if (length < 6 || part[0] != 8) return false;
    height = Number(part + 1), width = Number(part + 3), count_ = part[5];
    if (height < 1 || width < 1 || height > 65500 || width > 65500 || (count_ != 1 && count_ != 3)) return false;
    if (int64_t{3} * height * width >= 1 << 29 || length != 6 + 3 * count_) return false;  // TensorFlow's limit
    for (int number = 0; number < count_; ++number) {
      const uint8_t* from = part + 6 + 3 * number;
      Component& component = components_[number];
      component.id = from[0], component.across = from[1] >> 4, component.down = from[1] & 15;
      component.quantization = from[2];
      if (component.across < 1 || component.across > 4 || component.down < 1 || component.down > 4) return false;
      if (component.quantization > 3) return false;
      for (int other = 0; other < number; ++other) if (components_[other].id == component.id) return false;
    }
    return true;
  }

  bool ReadTables(const uint8_t* part, int length) {
    for (const uint8_t* next = part + length; part < next;) {
      if (next - part < 17 || part[0] >> 4 > 1 || (part[0] & 15) > 3) return false;
      Huffman& table = tables_[part[0] >> 4][part[0] & 15];
      int total = 0;
      for (int bits = 1; bits <= 16; ++bits) total += table.counts[bits] = part[bits];
      if (total > 256 || next - part < 17 + total) return false;
      std::memset(table.symbols, 0, sizeof table.symbols);
      std::memcpy(table.symbols, part + 17, static_cast<size_t>(total));
      table.is_set = true, part += 17 + total;
    }
    return true;
  }

  bool ReadScan(const uint8_t* part, int length, const bool* is_quantized) {
    if (!count_ || length != 4 + 2 * count_ || part[0] != count_) return false;
    const uint8_t* last = part + 1 + 2 * count_;
    if (last[0] != 0 || last[1] != 63 || last[2] != 0) return false;
    bool is_built[2][4] = {};
    for (int number = 0; number < count_; ++number) {
      Component& component = components_[number];
      component.dc = part[2 + 2 * number] >> 4, component.ac = part[2 + 2 * number] & 15;
      if (part[1 + 2 * number] != component.id || component.dc > 3 || component.ac > 3) return false;
      if (!is_quantized[component.quantization]) return false;
      for (int kind = 0; kind < 2; ++kind) {
        const int which = kind ? component.ac : component.dc;
        if (is_built[kind][which]) continue;
        if (!tables_[kind][which].is_set || !tables_[kind][which].Build(kind == 0)) return false;
        is_built[kind][which] = true;
      }
    }
    return true;
  }

  // Returns whether three components are YCbCr, as libjpeg finds it.
  bool IsYcc(bool is_jfif, int adobe) const {
    if (is_jfif) return true;
    if (adobe >= 0) return adobe == 1;
    return components_[0].id == 1 && components_[1].id == 2 && components_[2].id == 3;
  }

  bool Plan() {
    if (count_ == 1) components_[0].across = components_[0].down = 1;
    across_ = components_[0].across, down_ = components_[0].down;
    if (across_ > 2 || down_ > across_) return false;
    for (int number = 1; number < count_; ++number) {
      if (components_[number].across != 1 || components_[number].down != 1) return false;
    }
    if (across_ == 2 && (width + 1) / 2 <= 2) return false;  // there libjpeg repeats colors
    columns_ = (width + 8 * across_ - 1) / (8 * across_), rows_ = (height + 8 * down_ - 1) / (8 * down_);
    size_t sizes[3] = {}, total = 0;
    for (int number = 0; number < count_; ++number) {
      Component& component = components_[number];
      component.stride = (columns_ * component.across * 8 + 127) & ~63;
      component.height = (height * component.down + down_ - 1) / down_;
      component.width = (width * component.across + across_ - 1) / across_;
      sizes[number] = total;
      total += static_cast<size_t>(component.stride) * 8 * component.down * 2;
    }
    Grow(&planes_, total + 64), Grow(&upsampled_, 2 * Pairs()), Grow(&sums_, Pairs());
    Grow(&clean_, static_cast<size_t>(end_ - scan_) + kPadding + 64);
    for (int number = 0; number < count_; ++number) components_[number].plane = planes_.data() + sizes[number];
    return true;
  }

  template <typename T>
  static void Grow(std::vector<T>* values, size_t size) {
    if (values->size() < size) values->resize(size);
  }

 protected:
  size_t Pairs() const { return static_cast<size_t>(width) / 2 + 64; }  // of pixels, and room for whole registers
};

#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2"))), apply_to = function)
#endif
#define DALI_TF_INPUT_INLINE inline __attribute__((always_inline))

// The bits of a scan without stuffed zeros, the next one at the top of `word`.
struct Bits {
  const uint8_t* at;
  uint64_t word;
  int left;  // of `word`; after `Refill` 56 to 63

  DALI_TF_INPUT_INLINE void Refill() {
    uint64_t next;
    std::memcpy(&next, at, 8);
    word |= __builtin_bswap64(next) >> left;
    at += (63 - left) >> 3;
    left |= 56;
  }

  DALI_TF_INPUT_INLINE void Skip(int bits) { word <<= bits, left -= bits; }

  // As `Extend`, without a branch.
  DALI_TF_INPUT_INLINE static int Value(uint64_t word, int size) {
    const uint64_t missing = ~static_cast<uint64_t>(static_cast<int64_t>(word) >> 63);
    const int bits = static_cast<int>(word >> 1 >> (63 - size));
    return bits - static_cast<int>(_bzhi_u64(missing, static_cast<uint32_t>(size)));
  }
};

// Decodes a block into `block`, which must be all 0; returns true on invalid data.
DALI_TF_INPUT_INLINE bool DecodeBlock(Bits& bits, const Huffman& dc, const Huffman& ac, int* last_dc, int16_t* block) {
  bits.Refill();
  const auto known = dc.dc[bits.word >> (64 - kDcLook)];
  int code = known.code, size = known.size;
  if (__builtin_expect(!code, 0)) {
    const Code found = dc.Find(bits.word);
    if (!found.bits) return true;
    code = found.bits, size = found.symbol;
  }
  bits.Skip(code);
  *last_dc += Bits::Value(bits.word, size);
  bits.Skip(size);
  block[0] = static_cast<int16_t>(*last_dc);
  bool is_wrong = *last_dc < -2048 || *last_dc > 2047;
  unsigned k = 1, first;
  const Pair *table = ac.pairs, *pair;
  asm("" : "+r"(table));  // keeps the address in a register: the compiler would compute it for each coefficient
  const auto is_last = [&] {
    pair = table + (bits.word >> (64 - kLook));
    first = k + pair->run;
    block[kOrder.place[first]] = static_cast<int16_t>(Bits::Value(bits.word << pair->code, pair->size));
    k = first + pair->step;
    block[kOrder.place[k]] = pair->second;
    k += pair->has_second;
    return k > 63;
  };
  for (;;) {
    for (;;) {
      bits.Refill();
      if (is_last()) break;
      bits.Skip(pair->bits);
      if (is_last()) break;
      bits.Skip(pair->bits);
      if (is_last()) break;
      bits.Skip(pair->bits);
    }
    if (__builtin_expect(pair->run != kLong, 1)) {
      // Past the last coefficient there may be bits of the next block.
      bits.Skip(first == 63 ? pair->code + pair->size : pair->bits);
      return is_wrong | ((first > 63) & (pair->run != kEnd)) | ((first < 63) & (pair->step <= kEnd) & (k != 64));
    }
    k = first - kLong;
    bits.Refill();
    const Code found = ac.Find(bits.word);
    if (!found.bits) return true;
    bits.Skip(found.bits);
    if (Huffman::IsEnd(found.symbol)) return is_wrong;
    bits.Refill();
    k += static_cast<unsigned>(found.symbol >> 4), size = found.symbol & 15;
    if (k > 63) return true;
    block[kOrder.place[k]] = static_cast<int16_t>(Bits::Value(bits.word, size));
    bits.Skip(size);
    if (++k > 63) return is_wrong;
  }
}

DALI_TF_INPUT_INLINE __m256i Multiply(__m256i pairs, int x, int y) {  // and adds
  return _mm256_madd_epi16(pairs, _mm256_set1_epi32(static_cast<int>((x & 0xFFFF) | static_cast<uint32_t>(y) << 16)));
}

// The column pass of an inverse DCT of two blocks, one in each half of the registers.
template <int kShift>
DALI_TF_INPUT_INLINE void TransformColumns(__m256i* rows) {
  // Constants in 2^-13, as jidctint.c names them.
  constexpr int k0_298 = 2446, k0_390 = 3196, k0_541 = 4433, k0_765 = 6270, k0_899 = 7373, k1_175 = 9633;
  constexpr int k1_501 = 12299, k1_847 = 15137, k1_961 = 16069, k2_053 = 16819, k2_562 = 20995, k3_072 = 25172;
  const __m256i z3 = _mm256_add_epi16(rows[7], rows[3]), z4 = _mm256_add_epi16(rows[5], rows[1]);
  const __m256i sum = _mm256_add_epi16(rows[0], rows[4]), difference = _mm256_sub_epi16(rows[0], rows[4]);
  const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (kShift - 1));
  __m256i out[2][8];
  const auto transform = [&](int half_of) {
    const auto mix = [=](__m256i a, __m256i b) {
      return half_of ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b);
    };
    const __m256i r26 = mix(rows[2], rows[6]), r71 = mix(rows[7], rows[1]), r53 = mix(rows[5], rows[3]);
    const __m256i z34 = mix(z3, z4);
    const __m256i e0 = _mm256_add_epi32(_mm256_srai_epi32(mix(zero, sum), 3), half);
    const __m256i e1 = _mm256_add_epi32(_mm256_srai_epi32(mix(zero, difference), 3), half);
    const __m256i e2 = Multiply(r26, k0_541, k0_541 - k1_847), e3 = Multiply(r26, k0_541 + k0_765, k0_541);
    const __m256i y3 = Multiply(z34, k1_175 - k1_961, k1_175), y4 = Multiply(z34, k1_175, k1_175 - k0_390);
    const __m256i odd[] = {_mm256_add_epi32(Multiply(r71, -k0_899, k1_501 - k0_899), y4),
                           _mm256_add_epi32(Multiply(r53, -k2_562, k3_072 - k2_562), y3),
                           _mm256_add_epi32(Multiply(r53, k2_053 - k2_562, -k2_562), y4),
                           _mm256_add_epi32(Multiply(r71, k0_298 - k0_899, -k0_899), y3)};
    const __m256i even[] = {_mm256_add_epi32(e0, e3), _mm256_add_epi32(e1, e2), _mm256_sub_epi32(e1, e2),
                            _mm256_sub_epi32(e0, e3)};
    for (int row = 0; row < 4; ++row) {
      out[half_of][row] = _mm256_srai_epi32(_mm256_add_epi32(even[row], odd[row]), kShift);
      out[half_of][7 - row] = _mm256_srai_epi32(_mm256_sub_epi32(even[row], odd[row]), kShift);
    }
  };
  transform(0), transform(1);
  for (int row = 0; row < 8; ++row) rows[row] = _mm256_packs_epi32(out[0][row], out[1][row]);
}

DALI_TF_INPUT_INLINE void Transpose(__m256i* rows) {
  __m256i a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi16(rows[i], rows[i + 1]), a[i + 1] = _mm256_unpackhi_epi16(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_unpacklo_epi32(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm256_unpackhi_epi32(a[i + j], a[i + j + 2]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    rows[2 * i] = _mm256_unpacklo_epi64(b[i], b[i + 4]), rows[2 * i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 4]);
  }
}

// A block that was decoded, and what becomes of it.
struct Block {
  alignas(32) int16_t values[kBlock];
  const uint16_t *quantization, *limits;
  uint8_t* to;
  int stride;
};

// Returns a row of each of two blocks.
DALI_TF_INPUT_INLINE __m256i LoadRows(const void* first, const void* second, int row) {
  const __m128i low = _mm_load_si128(static_cast<const __m128i*>(first) + row);
  const __m128i high = _mm_load_si128(static_cast<const __m128i*>(second) + row);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

// Dequantizes and transforms two blocks; `excess` becomes other than 0 where a number is too large for the arithmetic.
DALI_TF_INPUT_INLINE void Transform(const Block* blocks, __m256i* excess) {
  __m256i rows[8], peak = _mm256_setzero_si256(), over = *excess;
  for (int row = 0; row < 8; ++row) {
    const __m256i values = LoadRows(blocks[0].values, blocks[1].values, row);
    const __m256i limits = LoadRows(blocks[0].limits, blocks[1].limits, row);
    over = _mm256_or_si256(over, _mm256_subs_epu16(_mm256_abs_epi16(values), limits));
    rows[row] = _mm256_mullo_epi16(values, LoadRows(blocks[0].quantization, blocks[1].quantization, row));
  }
  TransformColumns<11>(rows);
  for (int row = 0; row < 8; ++row) peak = _mm256_max_epu16(peak, _mm256_abs_epi16(rows[row]));
  *excess = _mm256_or_si256(over, _mm256_subs_epu16(peak, _mm256_set1_epi16(16383)));
  Transpose(rows);
  TransformColumns<18>(rows);
  Transpose(rows);
  for (int row = 0; row < 8; row += 2) {
    const __m256i both = _mm256_add_epi8(_mm256_packs_epi16(rows[row], rows[row + 1]), _mm256_set1_epi8(-128));
    const __m128i halves[] = {_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)};
    for (int number = 0; number < 2; ++number) {
      uint8_t* to = blocks[number].to + static_cast<ptrdiff_t>(row) * blocks[number].stride;
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to), halves[number]);
      _mm_storel_epi64(reinterpret_cast<__m128i*>(to + blocks[number].stride), _mm_srli_si128(halves[number], 8));
    }
  }
}

// Of each byte of three registers of pixels, where it is in a register of its channel.
struct Interleave {
  alignas(16) uint8_t from[3][3][16] = {};  // register, channel
  constexpr Interleave() {
    for (int place = 0; place < 48; ++place) {
      for (int channel = 0; channel < 3; ++channel) {
        from[place / 16][channel][place % 16] = static_cast<uint8_t>(place % 3 == channel ? place / 3 : 0x80);
      }
    }
  }
};
constexpr Interleave kInterleave;

DALI_TF_INPUT_INLINE __m256i LoadSamples(const uint8_t* from) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Returns factor * twice / 2^17, rounded: libjpeg's factors above 2^15 are split into ones and a rest.
DALI_TF_INPUT_INLINE __m256i Scale(__m256i twice, int factor) {
  const __m256i product = _mm256_mulhi_epi16(twice, _mm256_set1_epi16(static_cast<int16_t>(factor)));
  return _mm256_srai_epi16(_mm256_add_epi16(product, _mm256_set1_epi16(1)), 1);
}

// Converts YCbCr to RGB, 16 pixels at a time: both sides have room for a multiple of that.
inline void Convert(const uint8_t* luma, const uint8_t* blue, const uint8_t* red, int count, uint8_t* out) {
  const __m256i center = _mm256_set1_epi16(128), half = _mm256_set1_epi32(1 << 15);
  const __m256i factors = _mm256_set1_epi32(static_cast<int>((-22554 & 0xFFFF) | 18734u << 16));  // 0.344; 1 - 0.714
  for (int x = 0; x < count; x += 16, out += 48) {
    const __m256i y = LoadSamples(luma + x), cb = _mm256_sub_epi16(LoadSamples(blue + x), center);
    const __m256i cr = _mm256_sub_epi16(LoadSamples(red + x), center);
    const __m256i twice_cb = _mm256_add_epi16(cb, cb), twice_cr = _mm256_add_epi16(cr, cr);
    const auto green = [&](__m256i pairs) {
      return _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(pairs, factors), half), 16);
    };
    const __m256i low = green(_mm256_unpacklo_epi16(cb, cr)), high = green(_mm256_unpackhi_epi16(cb, cr));
    const __m256i r = _mm256_add_epi16(y, _mm256_add_epi16(Scale(twice_cr, 26345), cr));       // 1.402 = 1 + 0.402
    const __m256i g = _mm256_add_epi16(y, _mm256_sub_epi16(_mm256_packs_epi32(low, high), cr));
    const __m256i b = _mm256_add_epi16(y, _mm256_add_epi16(Scale(twice_cb, -14942), twice_cb));  // 1.772 = 2 - 0.228
    const __m256i rg = _mm256_permute4x64_epi64(_mm256_packus_epi16(r, g), 0xD8);
    const __m256i bb = _mm256_permute4x64_epi64(_mm256_packus_epi16(b, b), 0xD8);
    const __m128i channels[] = {_mm256_castsi256_si128(rg), _mm256_extracti128_si256(rg, 1),
                                _mm256_castsi256_si128(bb)};
    for (int number = 0; number < 3; ++number) {
      __m128i pixels = _mm_setzero_si128();
      for (int channel = 0; channel < 3; ++channel) {
        const __m128i from = _mm_load_si128(reinterpret_cast<const __m128i*>(kInterleave.from[number][channel]));
        pixels = _mm_or_si128(pixels, _mm_shuffle_epi8(channels[channel], from));
      }
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * number), pixels);
    }
  }
}

class Decoder : public Header {
 public:
  // Decodes the lines of a window from top to bottom; returns false if the file is refused, at any time.
  //
  // `window.left` is a multiple of 16. With `is_whole`, the whole scan must be valid; else only
  // what the window needs, as when libjpeg-turbo decodes a region. `sink.Want(line)` returns where
  // to write the window's part of the line, with room for 48 more bytes, or null to skip the line;
  // `sink.Take(line)` is called once it is written.
  template <typename Sink>
  bool Decode(const Window& window, bool is_whole, Sink&& sink) {
    const int unit_height = 8 * down_, unit_width = 8 * across_, reach = across_ - 1, below = down_ - 1;
    int last_dc[3] = {}, until_restart = restart_, restarts = 0, pending = 0, line = window.top;
    alignas(32) uint8_t unused[64];
    Block blocks[2];
    __m256i excess = _mm256_setzero_si256();
    next_ = scan_;
    Bits bits;
    if (!Clean(&bits)) return false;
    for (int row = 0; row < rows_; ++row) {
      const bool is_below = row * unit_height >= window.bottom + 2 * below;
      if (is_below && !is_whole) break;
      const bool is_needed = !is_below && (row + 1) * unit_height > window.top - 2 * below;
      for (int column = 0; column < columns_; ++column) {
        if (restart_ && until_restart-- == 0) {
          if (!IsAtEnd(bits) || marker_ != 0xD0 + (restarts++ & 7) || !Clean(&bits)) return false;
          last_dc[0] = last_dc[1] = last_dc[2] = 0, until_restart = restart_ - 1;
        }
        const bool is_shown = is_needed && (column + 1) * unit_width > window.left - 2 * reach &&
                              column * unit_width < window.right + 2 * reach;
        bool is_wrong = false;
        for (int number = 0; number < count_; ++number) {
          const Component& component = components_[number];
          const Huffman &dc = tables_[0][component.dc], &ac = tables_[1][component.ac];
          for (int place = 0; place < component.across * component.down; ++place) {
            Block& block = blocks[pending];
            auto* values = reinterpret_cast<__m256i*>(block.values);  // memset takes a fifth of all time
            for (int part = 0; part < 4; ++part) _mm256_store_si256(values + part, _mm256_setzero_si256());
            is_wrong |= DecodeBlock(bits, dc, ac, &last_dc[number], block.values);
            if (!is_shown) continue;
            const int y = place / component.across, x = column * component.across + place % component.across;
            block.quantization = quantization_[component.quantization], block.limits = limits_[component.quantization];
            block.to = Line(component, (row * component.down + y) * 8) + 8 * x, block.stride = component.stride;
            pending ^= 1;
            if (!pending) Transform(blocks, &excess);
          }
        }
        if (is_wrong || Left(bits) < 0) return false;
      }
      if (pending) {
        blocks[1].quantization = blocks[1].limits = quantization_[0], blocks[1].to = unused, blocks[1].stride = 8;
        std::memset(blocks[1].values, 0, sizeof blocks[1].values);
        Transform(blocks, &excess), pending = 0;
      }
      if (!_mm256_testz_si256(excess, excess)) return false;
      // The last line of a row needs colors of the next row.
      int ready = (row + 1) * unit_height - (row + 1 < rows_ ? below : 0);
      if (ready > window.bottom) ready = window.bottom;
      for (; line < ready; ++line) {
        if (uint8_t* out = sink.Want(line)) WriteLine(line, window, out), sink.Take(line);
      }
    }
    return !is_whole || (IsAtEnd(bits) && marker_ == 0xD9);
  }

 private:
  // Copies the scan up to its next marker without stuffed zeros; returns false if there is no marker, or a fill byte
  // (0xFF 0xFF): there libjpeg-turbo decodes a unit twice, and coefficients of the first time can be left in it.
  bool Clean(Bits* bits) {
    uint8_t* to = clean_.data();
    marker_ = 0;
    while (!marker_) {
      while (end_ - next_ >= 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next_));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
        const auto found = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-1))));
        const unsigned before = _tzcnt_u32(found);  // 32 if there is none
        next_ += before, to += before;
        if (found) break;
      }
      while (next_ < end_ && *next_ != 0xFF) *to++ = *next_++;
      if (end_ - next_ < 2 || next_[1] == 0xFF) return false;
      marker_ = next_[1], next_ += 2;
      if (!marker_) *to++ = 0xFF;
    }
    std::memset(to, 0, kPadding);
    clean_end_ = to;
    *bits = {clean_.data(), 0, 0};
    return true;
  }

  // How many bits there are before the marker; below 0 if more were taken.
  DALI_TF_INPUT_INLINE ptrdiff_t Left(const Bits& bits) const { return 8 * (clean_end_ - bits.at) + bits.left; }

  bool IsAtEnd(const Bits& bits) const { return Left(bits) >= 0 && Left(bits) < 8; }

  // Returns where a line of a component is; two rows of units are there at a time.
  DALI_TF_INPUT_INLINE static uint8_t* Line(const Component& component, int line) {
    return component.plane + static_cast<ptrdiff_t>(line & (16 * component.down - 1)) * component.stride;
  }

  void WriteLine(int line, const Window& window, uint8_t* out) {
    const int left = window.left, count = window.right - left;
    const uint8_t *luma = Line(components_[0], line) + left, *colors[2] = {};
    if (count_ == 1) {
      for (int x = 0; x < count; ++x) out[3 * x] = out[3 * x + 1] = out[3 * x + 2] = luma[x];
      return;
    }
    for (int number = 0; number < 2; ++number) {
      colors[number] = Line(components_[number + 1], line) + left;
      if (across_ == 2) {
        uint16_t* pairs = upsampled_.data() + static_cast<size_t>(number) * Pairs();
        Upsample(components_[number + 1], line, left / 2, (window.right + 1) / 2, pairs);
        colors[number] = reinterpret_cast<const uint8_t*>(pairs);
      }
    }
    Convert(luma, colors[0], colors[1], count, out);
  }

  // Interpolates samples [first, last) of a component to twice as many, each pair of them a little-endian number.
  void Upsample(const Component& component, int line, int first, int last, uint16_t* __restrict pairs) {
    uint16_t* __restrict sums = sums_.data() + 8;  // of the samples from `first` on, and of the one before and after
    const bool is_first = first == 0, is_last = last == component.width;  // there that one repeats
    const int from = is_first ? 0 : -1, count = last - first, to = is_last ? count : count + 1;
    if (down_ == 1) {
      const uint8_t* near = Line(component, line) + first;
      for (int x = from; x < to; ++x) sums[x] = near[x];
    } else {
      const int other = line / 2 + (line & 1 ? 1 : -1);
      const uint8_t* near = Line(component, line / 2) + first;
      const uint8_t* far = other < 0 || other >= component.height ? near : Line(component, other) + first;
      for (int x = from; x < to; ++x) sums[x] = static_cast<uint16_t>(3 * near[x] + far[x]);
    }
    if (is_first) sums[-1] = sums[0];
    if (is_last) sums[count] = sums[count - 1];
    const auto interpolate = [=](int even, int odd, int shift) {
      for (int x = 0; x < count; ++x) {
        const int near = 3 * sums[x], left = near + sums[x - 1] + even, right = near + sums[x + 1] + odd;
        pairs[x] = static_cast<uint16_t>(left >> shift | right >> shift << 8);
      }
    };
    down_ == 1 ? interpolate(1, 2, 2) : interpolate(8, 7, 4);
  }

  const uint8_t *next_ = nullptr, *clean_end_ = nullptr;
  int marker_ = 0;
};

#if defined(__clang__)
#pragma clang attribute pop
#endif
#pragma GCC pop_options
}  // namespace dali_tf_input::jpeg
#endif  // x86-64
#endif  // DALI_TF_INPUT_JPEG_H_

// Finds the image in a serialized tf.train.Example, and sets apart what else is in it.
//
// The image is taken from the plain form only, which every writer known to us makes: one Features, and in each entry the
// key before the value. TensorFlow parses the rest, and all that is not plain, and so decides what is an error. But it
// must not get what is no message at all: some of that makes TensorFlow 2.21 write beyond its memory.
// Source: tensorflow/core/example/{example,feature}.proto; protobuf.dev/programming-guides/encoding.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace dali_tf_input {

// A part of a serialized message.
struct Span {
  const uint8_t *at = nullptr, *end = nullptr;

  size_t size() const { return static_cast<size_t>(end - at); }
  bool Is(const std::string& text) const { return size() == text.size() && !std::memcmp(at, text.data(), text.size()); }

  bool TakeVarint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 70 && at < end; shift += 7) {
      const uint8_t byte = *at++;
      if (shift < 64) *value |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return true;
    }
    return false;
  }

  bool Take(uint64_t bytes, Span* taken) {
    if (bytes > size()) return false;
    *taken = {at, at + bytes};
    at += bytes;
    return true;
  }

  // Takes a field with a length, of this number, from the front; `inner` is what is inside. Returns false, with nothing
  // known about this span, if there is none.
  bool TakeField(uint64_t number, Span* inner) {
    uint64_t tag, length;
    return TakeVarint(&tag) && tag == (number << 3 | 2) && TakeVarint(&length) && Take(length, inner);
  }

  // The same, of a span that holds nothing else.
  bool TakeOnly(uint64_t number, Span* inner) { return TakeField(number, inner) && at == end; }
};

enum class Message { kExample, kFeatures, kEntry, kFeature, kBytes, kFloats, kIntegers, kNone };

// Returns the message, or list of numbers, that a field with a length holds; kNone for bytes, and for unknown fields.
inline Message InnerMessage(Message outer, uint64_t number) {
  if (outer == Message::kExample && number == 1) return Message::kFeatures;
  if (outer == Message::kFeatures && number == 1) return Message::kEntry;
  if (outer == Message::kEntry && number == 2) return Message::kFeature;
  if (outer != Message::kFeature || number < 1 || number > 3) return Message::kNone;
  return number == 1 ? Message::kBytes : number == 2 ? Message::kFloats : Message::kIntegers;
}

// Returns whether a message is well-formed: all its fields end within it, and so do those inside.
inline bool IsMessage(Message kind, Span span) {
  while (span.at < span.end) {
    uint64_t tag, value;
    Span inner;
    if (!span.TakeVarint(&tag) || tag >> 3 == 0 || tag >> 32) return false;
    switch (tag & 7) {
      case 0:
        if (!span.TakeVarint(&value)) return false;
        continue;
      case 1:
        if (!span.Take(8, &inner)) return false;
        continue;
      case 5:
        if (!span.Take(4, &inner)) return false;
        continue;
      case 2:
        break;
      default:  // groups, which no version of these messages had
        return false;
    }
    if (!span.TakeVarint(&value) || !span.Take(value, &inner)) return false;
    const bool is_list = tag >> 3 == 1;  // a packed one
    if (kind == Message::kFloats && is_list && inner.size() % 4) return false;
    while (kind == Message::kIntegers && is_list && inner.at < inner.end) {
      if (!inner.TakeVarint(&value)) return false;
    }
    const Message next = InnerMessage(kind, tag >> 3);
    if (next != Message::kNone && !IsMessage(next, inner)) return false;
  }
  return true;
}

// Which features have the image, and, if it is stored as pixels, its height and width. All keys differ.
struct ImageKeys {
  std::vector<std::string> images, sides;
};

// Reads a feature of one int64; returns false if it is anything else.
inline bool ReadInteger(Span feature, int64_t* value) {
  Span list, packed;
  uint64_t tag, bits;
  if (!feature.TakeOnly(3, &list)) return false;
  Span rest = list;
  if (rest.TakeOnly(1, &packed)) {
    list = packed;
  } else if (!list.TakeVarint(&tag) || tag != (1 << 3 | 0)) {
    return false;
  }
  if (!list.TakeVarint(&bits) || list.at != list.end) return false;
  *value = static_cast<int64_t>(bits);
  return true;
}

// Finds the value of the first image key that is there and not empty, and the sides; all entries but those of image keys
// make `rest`, an Example, which is well-formed. Returns false if the Example is not plain or well-formed, or lacks one.
inline bool SplitExample(Span example, const ImageKeys& keys, Span* image, int64_t* sides, std::string* rest) {
  Span features;
  if (!example.TakeOnly(1, &features)) return false;
  rest->clear();
  const size_t num_images = keys.images.size(), num_keys = num_images + keys.sides.size();
  size_t found = num_images;
  uint64_t seen = 0;  // a bit for each key
  while (features.at < features.end) {
    const uint8_t* start = features.at;
    Span entry, key, feature, list, value;
    if (!features.TakeField(1, &entry)) return false;
    const Span whole = entry;
    if (!entry.TakeField(1, &key)) return false;
    size_t number = 0;
    while (number < num_keys && !key.Is(number < num_images ? keys.images[number] : keys.sides[number - num_images])) ++number;
    if (number < num_keys) {
      if (seen >> number & 1) return false;
      seen |= uint64_t{1} << number;
    }
    if (number >= num_images) {
      if (!IsMessage(Message::kEntry, whole)) return false;
      rest->append(reinterpret_cast<const char*>(start), static_cast<size_t>(features.at - start));
      if (number == num_keys) continue;
      if (!entry.TakeOnly(2, &feature) || !ReadInteger(feature, sides + number - num_images)) return false;
      continue;
    }
    if (!entry.TakeOnly(2, &feature) || !feature.TakeOnly(1, &list) || !list.TakeOnly(1, &value)) return false;
    if (value.size() && number < found) found = number, *image = value;
  }
  char header[11] = {'\n'};
  size_t size = 1;
  for (uint64_t length = rest->size();; length >>= 7) {
    header[size++] = static_cast<char>(length < 128 ? length : (length & 127) | 128);
    if (length < 128) break;
  }
  rest->insert(0, header, size);
  const uint64_t all_sides = ((uint64_t{1} << keys.sides.size()) - 1) << num_images;
  return found < num_images && (seen & all_sides) == all_sides;
}

}  // namespace dali_tf_input
